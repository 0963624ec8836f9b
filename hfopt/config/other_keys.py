"""Keys beside those of the Trainer: what no figure shows, what LLaMA-Factory refuses and what is unknown here is reported.

Source: LLaMA-Factory, src/llamafactory/hparams/parser.py (get_train_args, _verify_model_args) and finetuning_args.py (__post_init__), as of
August 2026. Only rules that the file alone decides are here: those about the device and about installed packages are not.

What the reader asks for is read; what another tool's table knows changes nothing of a step, unless `other_keys.toml` says that it does. The
rest is a script's own, and may or may not matter: it is listed, but for names that say themselves what they are about (logs, paths, data).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.config.deepspeed_json import named_stage
from hfopt.config.lookup import Facts
from hfopt.config.trained_parts import LORA_SECTIONS
from hfopt.config.training_arguments import ALIASES, GONE, NEWER, known_elsewhere
from hfopt.config.yaml_document import NodePath
from hfopt.facts.argument_effects import effects
from hfopt.facts.training_keys import installed


@dataclass(frozen=True, kw_only=True, slots=True)
class FactoryRule:
    key: str
    broken: Callable[[Facts], bool]
    message: str
    fix: str | None = None


def _kind(facts: Facts) -> str:
    return (facts.text("finetuning_type") or "lora").lower()


def _stage(facts: Facts) -> str:
    return (facts.text("stage") or "sft").lower()


def _packed(facts: Facts) -> bool:
    return facts.whole("quantization_bit") is not None


def _evaluates(facts: Facts) -> bool:
    stated = facts.text("eval_strategy", "evaluation_strategy")
    return stated not in (None, "no") or facts.true("do_eval", "do_predict", "predict_with_generate")


def _zero_3(facts: Facts) -> bool:
    return named_stage(facts.text("deepspeed")) == 3


_OF_LORA = ("use_rslora", "use_dora", "pissa_init")
RULES: tuple[FactoryRule, ...] = (
    FactoryRule(
        key="quantization_bit",
        broken=lambda facts: _packed(facts) and _kind(facts) not in ("lora", "oft"),
        message="quantization_bit is only for finetuning_type lora or oft",
        fix="finetuning_type: lora, or drop quantization_bit",
    ),
    FactoryRule(
        key="adapter_name_or_path",
        broken=lambda facts: facts.text("adapter_name_or_path") is not None and _kind(facts) != "lora",
        message="adapter_name_or_path is only for finetuning_type lora",
    ),
    FactoryRule(
        key="finetuning_type",
        broken=lambda facts: _kind(facts) == "lora" and facts.true("use_galore", "use_apollo", "use_badam"),
        message="GaLore, APOLLO and BAdam train whole weights, and finetuning_type is lora",
        fix="finetuning_type: full",
    ),
    FactoryRule(
        key="use_llama_pro",
        broken=lambda facts: facts.true("use_llama_pro") and _kind(facts) == "full",
        message="use_llama_pro is only for finetuning_type freeze or lora",
    ),
    FactoryRule(
        key="pissa_init",
        broken=lambda facts: facts.true("pissa_init") and (_packed(facts) or _stage(facts) in ("ppo", "kto", "dpo")),
        message="pissa_init is not for quantized models, nor for stages with a reference model",
    ),
    FactoryRule(
        key="resize_vocab",
        broken=lambda facts: facts.true("resize_vocab") and _packed(facts),
        message="resize_vocab cannot resize the embeddings of a quantized model",
    ),
    FactoryRule(
        key="predict_with_generate",
        broken=lambda facts: facts.true("predict_with_generate") and _stage(facts) != "sft",
        message="predict_with_generate is only for stage sft",
    ),
    FactoryRule(
        key="neat_packing",
        broken=lambda facts: facts.true("neat_packing") and _stage(facts) != "sft",
        message="neat_packing is only for stage sft",
    ),
    FactoryRule(
        key="load_best_model_at_end",
        broken=lambda facts: facts.true("load_best_model_at_end") and _stage(facts) in ("rm", "ppo"),
        message="load_best_model_at_end is not for the stages rm and ppo",
    ),
    FactoryRule(
        key="reward_model",
        broken=lambda facts: _stage(facts) == "ppo" and facts.text("reward_model") is None,
        message="stage ppo needs a reward_model",
    ),
    FactoryRule(
        key="val_size",
        broken=lambda facts: _evaluates(facts) and facts.text("eval_dataset") is None and not facts.number("val_size"),
        message="an evaluation needs samples, and neither eval_dataset nor val_size is set",
        fix="val_size: 0.1",
    ),
    FactoryRule(
        key="max_steps",
        broken=lambda facts: facts.true("streaming") and facts.whole("max_steps") is None,
        message="streaming data has no length: max_steps must be set",
    ),
    FactoryRule(
        key="pure_bf16",
        broken=lambda facts: facts.true("pure_bf16") and _zero_3(facts),
        message="pure_bf16 does not go with DeepSpeed's ZeRO-3",
        fix="drop pure_bf16: under ZeRO-3 the weights stay in 16 bits anyway",
    ),
    FactoryRule(
        key="deepspeed",
        broken=lambda facts: facts.has("deepspeed") and facts.get("deepspeed") is not None and facts.true("use_galore", "use_apollo"),
        message="GaLore and APOLLO do not go with DeepSpeed",
    ),
    *(
        FactoryRule(
            key=key,
            broken=lambda facts, key=key: facts.true(key) and _kind(facts) not in ("lora",),  # type: ignore[misc]
            message=f"{key} is only for finetuning_type lora",
        )
        for key in _OF_LORA
    ),
)


def broken_rules(facts: Facts) -> Iterator[FactoryRule]:
    """Those that LLaMA-Factory would refuse to start for."""
    return (rule for rule in RULES if rule.broken(facts))


_STAGES = ("pt", "sft", "rm", "ppo", "dpo", "kto", "orpo")  # llamafactory 0.9.5, hparams/finetuning_args.py; orpo: until 0.7
_OF_PPO = ("num_ppo_epochs", "ppo_epochs", "total_episodes", "cliprange_value", "vf_coef")  # trl's PPOConfig, past and present
_OF_SELF_DISTILLATION = ("num_loss_tokens_to_skip", "generate_from_teacher")  # trl's SDFTConfig (experimental)
_TEACHERS = ("teacher_model_name_or_path", "teacher_model", "teacher_model_path", "teacher_name_or_path", "teacher")
_DATA_MAKING = ("data", "dataset", "datasets", "generation", "generate", "synthetic", "data_generation", "synthesis")


def beyond_one_model(facts: Facts) -> str | None:
    """Why a step of the trained model alone says nothing of the job: others work on the card beside it."""
    if (facts.has(*_OF_PPO) and not facts.has("group_size", "num_generations", "grpo_epochs")) or "ppo" in (
        (facts.text("stage") or "").lower(),
        (facts.text("rlhf_type") or "").lower(),
    ):
        return "PPO trains a policy and a value model beside a reward and a reference model, and generates between its updates"
    if facts.has("finetuning_type") and _stage(facts) not in _STAGES:
        return (
            f"stage {_stage(facts)} is none of LLaMA-Factory's ({', '.join(_STAGES)}): what a fork's own stage computes is not known here"
        )
    if facts.has(*_OF_SELF_DISTILLATION):
        return "self-distillation generates with the model that it trains, beside a copy of it that teaches"
    if facts.text("judge") is not None and facts.has("missing_eos_penalty", "max_new_tokens", "reward_model_path"):
        return "an online method generates with the model that it trains, beside a reference and a judge"
    if (online := _online_method(facts)) is not None:
        return f"{online}: a method that generates with the model that it trains, and is none of TRL's GRPO and RLOO"
    teacher = facts.text(*_TEACHERS, not_under=_DATA_MAKING) or facts.text("name", "model", "path", "name_or_path", under=("teacher",))
    hosted = teacher is None or "/" not in teacher  # a teacher behind an API only writes the data
    return None if hosted else f"a teacher ({teacher}) stands beside the trained model, and the logits of both are held whole"


_ONLINE = re.compile(r"reinforce|rlvr|rejection_sampling|expert_iteration|on_?policy|(?:^|_)(?:opd|gkd|remax|raft|rft)(?:$|_)")


def _online_method(facts: Facts) -> str | None:
    """What says so: the method by its name, or a prompt's length and the sampling of what follows it beside no loss of preferences."""
    if facts.has("num_generations", "group_size", "num_samples_per_prompt", "rollouts_per_prompt", "generations_per_prompt", "rloo_k"):
        return None
    for key in ("algorithm", "algo", "rl_algorithm", "method", "training_method", "trainer_type", "loss"):
        stated = re.sub(r"[-\s]", "_", (facts.text(key, not_under=_DATA_MAKING) or "").lower())
        if _ONLINE.search(stated):
            return f"{key}: {stated}"
    prompts, sampled = facts.has("max_prompt_length", "max_prompt_len", "kl_coef", "init_kl_coef"), facts.has("max_new_tokens")
    if prompts and sampled and facts.has("temperature") and not facts.has("beta", "dpo_beta", "loss_type", "finetuning_type"):
        return "max_new_tokens beside a prompt's length or a KL term"
    return None


def stage_notes(facts: Facts) -> tuple[str, ...]:
    """What a stage does beside the step that is planned."""
    if facts.true("do_predict", "do_eval") and not facts.true("do_train"):
        return ("do_train is not set, so this file evaluates or predicts: what is planned is a training with its settings",)
    return ()


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same module under its old name

_MOST_LISTED = 8
_SAME_STEP = frozenset(
    {"bias", "inference_mode", "fan_in_fan_out", "init_lora_weights", "method", "name", "type", "adapter_name", "enabled"}
)
_OF_A_STEP = re.compile(
    r"freez|(^|_)(layers?|hidden|heads?|dim|vocab|experts?|towers?|adapters?|embeddings?|pixels?|images?|frames?|crop|tiles?)(_|$)|batch_size"
    r"|lora|quant|offload|chunk|checkpointing|recompute|flash|attn|attention|kernel|fused|packing|(^|_)len(gth)?(_|$)|parallel|shard|teacher|ema(_|$)"
)
"""Words in the names of keys that may change what a step holds, wherever in the file they stand."""


def unread(facts: Facts, sections: Iterable[NodePath]) -> Iterator[str]:
    """A sentence for the keys that another tool reads and no figure shows, by what is to say of them, and one for those nobody knows."""
    reasons, places = _reasons(), set(sections)
    named: dict[str, list[str]] = {}
    unknown: list[str] = []
    for path, value in facts.leaves():
        key = path[-1]
        if _is_unset(value):
            continue
        if key == "reward_funcs" and (models := [str(one) for one in (value if isinstance(value, list) else [value]) if _is_model(one)]):
            named.setdefault(reasons["reward_model"], []).append(f"reward_funcs: {', '.join(models)}")
        elif (beside := next((part for part in path[:-1] if part in _MODELS_BESIDE), None)) is not None and key in _NAMING_A_MODEL:
            named.setdefault(reasons[beside], []).append(f"{beside}: {_shown(value)}")
        elif key in reasons:
            named.setdefault(reasons[key], []).append(f"{key}: {_shown(value)}")
        elif not key.startswith("_") and not _is_known(key, facts.asked) and _may_matter(path, inside=path[:-1] in places):
            unknown.append(key)
    for why, settings in named.items():
        yield f"{', '.join(settings)} {'is' if len(settings) == 1 else 'are'} set; {why}"
    if unknown:
        yield not_read(unknown)


_MODELS_BESIDE = frozenset({"reward_model", "value_model", "critic", "critic_model"})
_NAMING_A_MODEL = frozenset({"model_name", "model_name_or_path", "name_or_path", "name", "path", "model_path", "model_id", "id"})


def not_read(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_LISTED} more" if len(keys) > _MOST_LISTED else ""
    return f"not read, so in no figure: {', '.join(dict.fromkeys(keys[:_MOST_LISTED]))}{more}"


def may_change_a_step(key: str, value: Any) -> bool:
    """By the words in its name, where it is set at all."""
    return _OF_A_STEP.search(key.lower()) is not None and not _is_unset(value)


def _is_model(reward: Any) -> bool:
    """TRL loads what has an owner; a script's own name for a function says its size where it is a model (skywork-qwen3-8b)."""
    return "/" in str(reward) or re.search(r"[-_]\d+(\.\d+)?b([-_]|$)", str(reward).lower()) is not None


def _may_matter(path: NodePath, *, inside: bool) -> bool:
    """In a section of arguments whatever is not about other things; elsewhere in the file what names a part of a step."""
    key = path[-1].lower().replace("-", "_")
    if len(path) > 1 and path[-2].lower() in LORA_SECTIONS:
        return key not in _SAME_STEP
    if _OF_A_STEP.search(key) is not None:
        return inside or not any(_words("other_sections") & set(re.split(r"[\W_]+", part.lower())) for part in path[:-1])
    return inside and not _words("other_things") & set(re.split(r"[\W_]+", key))


def _is_unset(value: Any) -> bool:
    """Also one device, one shard, no block: nothing is changed."""
    if isinstance(value, bool) or value is None:
        return not value
    return value in ("", [], {}, "none", "None", "false", "no", 0, 1)


def _is_known(key: str, asked: Collection[str]) -> bool:
    present = installed()
    own = key in present.fields or key in present.seq2seq or key in ALIASES or key in GONE or key in NEWER or key in effects()
    return own or key.lower().replace("-", "_") in asked or key in known_elsewhere()


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return table


@cache
def _reasons() -> dict[str, str]:
    return {key: group["why"] for group in _table()["named"] for key in group["keys"]}


@cache
def _words(which: str) -> frozenset[str]:
    return frozenset(_table()[which].split())


def _shown(value: Any) -> str:
    text = "true" if value is True else str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
