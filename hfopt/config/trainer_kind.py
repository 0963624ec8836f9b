"""Which Trainer reads a file: the one it names, else the one whose keys it has, else the words of its path.

TRL's scripts take the arguments of several classes from one flat file, so that a short file may have no key of a single trainer's own. It
is TRL's when its keys are all known to TRL's parser, one of them is none of TrainingArguments, and the model is no encoder by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.config.lookup import Facts, model_name
from hfopt.config.other_tools import is_swift, is_unsloth
from hfopt.config.training_arguments import trl_keys
from hfopt.facts.training_keys import installed
from hfopt.schema import TrainerKind

_NAMED: Mapping[str, TrainerKind] = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "orpo": "ORPO",
    "simpo": "CPO",
    "cpo": "CPO",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
    "sft": "SFT",
}
_STATED_BY = ("stage", "rlhf_type", "rl", "method", "trainer_type", "trainer_class", "trainer", "training_type")
_OWN_KEYS: tuple[tuple[TrainerKind, tuple[str, ...]], ...] = (
    ("RLOO", ("rloo_k", "normalize_advantages", "reward_clip_range")),
    ("GRPO", ("num_generations", "reward_funcs", "steps_per_generation", "scale_rewards")),
    ("KTO", ("desirable_weight", "undesirable_weight")),
    ("Reward", ("center_rewards_coefficient",)),
    ("CPO", ("gamma_beta_ratio", "simpo_gamma", "cpo_alpha")),
    ("DPO", ("rpo_alpha", "f_divergence_type", "precompute_ref_log_probs", "ref_model_sync_steps", "pref_beta", "reference_free")),
)
"""Keys that only one trainer's config has (trl 0.12 to 1.16; gamma_beta_ratio: the scripts of the SimPO paper)."""
_LOSSES: Mapping[str, TrainerKind] = {
    **dict.fromkeys(("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "apo_zero"), "DPO"),
    **dict.fromkeys(("aot_unpaired", "aot_pair", "apo_down", "discopop", "sigmoid_norm"), "DPO"),
    **dict.fromkeys(("simpo", "alphapo"), "CPO"),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "KTO"),
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "cispo"), "GRPO"),
}
"""Values of loss_type, by the trainer that has them."""
_SFT_KEYS = (
    *("dataset_mixer", "dataset_mixture", "dataset_text_field", "packing", "use_peft", "completion_only_loss", "dataset_num_proc"),
    *("assistant_only_loss", "padding_free", "packing_strategy"),
)
_DATA = ("dataset_name", "datasets", "dataset_mixer", "dataset_mixture")
_ENCODERS = re.compile(
    r"bert|electra|xlnet|(^|[-_/])m?t5|bart|pegasus|marian|opus-mt|(^|[-_/])vit|swin|clip|whisper|wav2vec|hubert|mpnet|minilm|layoutlm"
    r"|longformer|(^|[-_/])(e5|bge|gte)-|sentence-transformers|resnet|convnext|detr|nllb|m2m100",
    re.IGNORECASE,
)
"""Words in the names of models that are no causal language models."""


def trainer_kind(facts: Facts, path: str, data: Mapping[Any, Any]) -> TrainerKind:
    """`data` is the whole file."""
    stage = (facts.text(*_STATED_BY) or "").lower()
    for word, trainer in _NAMED.items():
        if re.search(rf"(?:^|[_\W]){word}|{word}(?:$|[_\W]|trainer)", stage):
            return trainer
    if stage in ("rm", "pt", "ppo") and (facts.has("finetuning_type", "cutoff_len", "template") or is_swift(facts)):
        return "Reward" if stage == "rm" else "SFT"
    if is_swift(facts):
        return "SFT"
    if (section := _by_section(data)) is not None:
        return section
    own = next((trainer for trainer, keys in _OWN_KEYS if facts.has(*keys)), None)
    preference = own or _by_loss(facts)
    by_path = _by_path(path)
    if preference is not None:
        return by_path if preference in ("DPO", "GRPO") and by_path in ("ORPO", "CPO", "RLOO") else preference
    name = model_name(facts)
    if facts.has(*_SFT_KEYS) and (name is None or _ENCODERS.search(name) is None):
        return by_path or "SFT"
    if facts.has("finetuning_type") or is_unsloth(facts) or (facts.has("cutoff_len") and facts.has("template")):
        return "SFT"
    if facts.has("predict_with_generate", "generation_max_length", "sortish_sampler", "generation_num_beams"):
        return "Seq2SeqTrainer"
    return (by_path or "SFT") if _of_a_trl_script(facts, data, said=by_path is not None) else "Trainer"


def _by_section(data: Mapping[Any, Any]) -> TrainerKind | None:
    """A section of the method's own (`training: {grpo: {group_size: 4}}`), where there is one alone."""
    inner = [value for value in data.values() if isinstance(value, Mapping)]
    sections = [
        key.lower() for level in (data, *inner) for key, value in level.items() if isinstance(key, str) and isinstance(value, Mapping)
    ]
    words = {word for key in sections for word in re.split(r"[\W_]+", key)}
    found = {trainer for word, trainer in _NAMED.items() if word in words and word != "reward"}  # `reward:` is a part of GRPO's files
    return found.pop() if len(found) == 1 else None


def _by_path(path: str) -> TrainerKind | None:
    """By the file's own name first, then by the folders around it, the nearest first; `__` stands for a folder in flattened names."""
    for part in reversed(re.split(r"[/\\]|__", path.lower())):
        words = set(re.split(r"[\W_]+", part))
        if (found := next((trainer for word, trainer in _NAMED.items() if word in words), None)) is not None:
            return found
    return None


def _by_loss(facts: Facts) -> TrainerKind | None:
    """A loss by its name, or a `beta` beside what only a preference job has."""
    named = facts.get("loss_type")
    named = named[0] if isinstance(named, list) and named else named
    of_the_loss = _LOSSES.get(named) if isinstance(named, str) else None
    if of_the_loss is not None and facts.has("beta", *_DATA):
        return of_the_loss
    return "DPO" if facts.has("beta") and facts.has("max_prompt_length", "max_length", "loss_type", *_DATA) else None


def _of_a_trl_script(facts: Facts, data: Mapping[Any, Any], *, said: bool) -> bool:
    """Every key is one that TRL's parser takes; `said`: the path names a trainer, so that the length need not be there."""
    keys = {key for key in data if isinstance(key, str)}
    known = trl_keys("script") | trl_keys("SFT") | installed().fields.keys()
    name = facts.text("model_name_or_path")
    if not facts.has(*_DATA) or name is None or not keys <= known or not (said or "max_length" in keys):
        return False
    return _is_causal(name)


def _is_causal(name: str) -> bool:
    config = Path(name).expanduser() / "config.json"
    if config.is_file():
        try:
            architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or ["CausalLM"]
        except (OSError, ValueError, AttributeError):
            return True
        return any("CausalLM" in str(one) or "LMHead" in str(one) for one in architectures)
    return _ENCODERS.search(name) is None
