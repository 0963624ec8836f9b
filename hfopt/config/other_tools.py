"""Configs of other tools: those that are read in their own way, and those that are refused by name, with what could be planned.

Source: torchtune 0.7 (recipes/configs): the builder's name says model, size and adapter, such as `lora_llama3_1_8b`.

Tools that read TrainingArguments YAMLs in their own way: what they take differently, and under which key they take it. Sources:
llamafactory 0.9.5 (hparams/model_args.py, hparams/training_args.py, hparams/parser.py: OmegaConf reads the file) and trl 1.16.0
(scripts/utils.py: TrlParser makes the YAML's values argparse defaults, and argparse converts default text by type); ms-swift as of August
2026 (swift/cli/main.py: each key becomes a command-line option; its defaults: swift/arguments and swift/trainers/arguments.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hfopt.compat.versions import source_folder
from hfopt.config.lookup import Facts, whole_number
from hfopt.config.training_arguments import ACCUMULATION, BATCH, MAYBE_WHOLE, WHOLE_BATCHES, Severity, trl_keys
from hfopt.facts.training_keys import RENAMED, TRAINERS, trl_parser_keys

_FAMILIES: tuple[tuple[str, str], ...] = (  # builder -> hub id; {} is the size as the Hub writes it
    (r"llama2_(\d+b)", "meta-llama/Llama-2-{}-hf"),
    (r"llama3_1_(\d+b)", "meta-llama/Llama-3.1-{}"),
    (r"llama3_2_vision_(\d+b)", "meta-llama/Llama-3.2-{}-Vision-Instruct"),
    (r"llama3_2_(\d+b)", "meta-llama/Llama-3.2-{}"),
    (r"llama3_3_(\d+b)", "meta-llama/Llama-3.3-{}-Instruct"),
    (r"llama3_(\d+b)", "meta-llama/Meta-Llama-3-{}"),
    (r"mistral_(7b)", "mistralai/Mistral-{}-v0.1"),
    (r"gemma2_(\d+b)", "google/gemma-2-{}"),
    (r"gemma_(\d+b)", "google/gemma-{}"),
    (r"qwen2_5_(\d+(?:_\d+)?b)(?:_instruct|_base)?", "Qwen/Qwen2.5-{}"),
    (r"qwen2_(\d+(?:_\d+)?b)", "Qwen/Qwen2-{}"),
    (r"qwen3_(\d+(?:_\d+)?b)(?:_instruct|_base)?", "Qwen/Qwen3-{}"),
    (r"phi3_(mini)", "microsoft/Phi-3-{}-4k-instruct"),
    (r"phi4_(14b)", "microsoft/phi-4"),
)
_BUILDER = re.compile(r"torchtune\.models\.[\w.]*?(?P<adapter>q?lora_)?(?P<model>(?:llama|mistral|gemma|qwen|phi)\w*)$")
_SMALL_SIZES = ("llama-2", "gemma", "phi-3")  # families whose ids write the size in small letters


def torchtune_words(data: Mapping[Any, Any]) -> tuple[str, str]:
    """What it is, and what hfopt can say of it."""
    model = data.get("model")
    builder = str(model.get("_component_") or "") if isinstance(model, dict) else ""
    match = _BUILDER.search(builder)
    name = None if match is None else hub_id(match["model"])
    batch, steps = (whole_number(data.get(key)) for key in ("batch_size", "gradient_accumulation_steps"))
    trains = "" if not builder else f" that trains {builder.rsplit('.', 1)[-1]}" + (f" with batch {batch} × {steps or 1}" if batch else "")
    what = f"a config of torchtune{trains}, whose training loop is its own: it is not planned"
    if name is None:
        return what, "hfopt plans configs of the HuggingFace Trainer, TRL, LLaMA-Factory and axolotl"
    tokenizer = data.get("tokenizer")
    length = whole_number(tokenizer.get("max_seq_len")) if isinstance(tokenizer, dict) else None
    return what, f"the same model under the HuggingFace Trainer: hfopt estimate {name} --seq-len {length or 2048} --precision bf16"


def hub_id(builder: str) -> str | None:
    for pattern, name in _FAMILIES:
        found = re.fullmatch(pattern, builder)
        if found is not None:
            size = found[1].replace("_", ".")
            return name.format(size if name.split("/")[1].lower().startswith(_SMALL_SIZES) else size.upper())
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpelling:
    """How a tool says one argument: its key, and its value for each value of ours (None: the same value)."""

    key: str
    values: Mapping[Any, Any] | None = None

    def say(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(value, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    name: str
    text_costs: Mapping[str, Severity] = field(default_factory=dict)  # by finding: text that the tool converts itself is no error
    own_reader: bool = False  # it reads the file itself: a key that transformers dropped is its own, and stays
    gone: Mapping[str, str | None] = field(default_factory=dict)  # keys its parser took once: the new name, None: there is none
    version: str | None = None  # of the tool, where `gone` was read from it
    words: Mapping[str, ToolSpelling] = field(default_factory=dict)


PLAIN = Dialect(name="HfArgumentParser")
TRL = Dialect(name="TrlParser", text_costs={"number_as_string": "warning", "bool_as_string": "warning"})
LLAMA_FACTORY = Dialect(
    name="LLaMA-Factory",
    text_costs={"number_as_string": "note"},
    own_reader=True,
    words={
        "gradient_checkpointing": ToolSpelling(key="disable_gradient_checkpointing", values={True: False, False: True}),
        "use_liger_kernel": ToolSpelling(key="enable_liger_kernel"),
        "attn_implementation": ToolSpelling(key="flash_attn", values={"flash_attention_2": "fa2", "eager": "disabled"}),
    },
)


MS_SWIFT = Dialect(
    name="ms-swift",
    text_costs={"number_as_string": "note", "bool_as_string": "note"},
    own_reader=True,
    words={"attn_implementation": ToolSpelling(key="attn_impl", values={"flash_attention_2": "flash_attn"})},
)


def is_llama_factory(facts: Facts) -> bool:
    return facts.has("finetuning_type") or (facts.has("template") and facts.has("stage", "cutoff_len"))


_SWIFT_TUNERS = frozenset(
    {
        *("lora", "full", "longlora", "adalora", "llamapro", "adapter", "vera", "boft", "fourierft", "reft", "bone", "lora_llm"),
        *("ia3", "prompt", "rslora", "qlora"),
    }
)
_SWIFT_METHODS = frozenset({"dpo", "orpo", "simpo", "kto", "cpo", "rm", "ppo", "grpo", "gkd"})
_SWIFT_SAMPLES = 16  # in an optimizer step, where the file states no accumulation
_SWIFT_STATED = re.compile(r"#(\d+)$")  # dataset: org/name#500


def is_swift(facts: Facts) -> bool:
    """A way to tune or an RLHF method under ms-swift's names for them, beside its name for the model."""
    tuner = (facts.text("train_type", "tuner_type", "sft_type") or "").lower()
    method = (facts.text("rlhf_type") or "").lower()
    return (tuner in _SWIFT_TUNERS or method in _SWIFT_METHODS) and facts.text(
        "model", "model_id_or_path", "model_type", "adapters"
    ) is not None


def swift_defaults(facts: Facts, args: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Arguments in force that the file need not name."""
    batch = args.get(BATCH, 1)
    generates = (facts.text("rlhf_type") or "").lower() == "grpo"
    found: dict[str, Any] = {
        BATCH: 1,
        "per_device_eval_batch_size": 1,
        ACCUMULATION: 1 if generates else max(1, math.ceil(_SWIFT_SAMPLES / (batch * world_size))),
        "gradient_checkpointing": True,
    }
    if not {"fp16", "bf16"} & args.keys():
        said = (facts.text("torch_dtype") or "bfloat16").lower().removeprefix("torch.")
        found["bf16" if said in ("bfloat16", "bf16") else "fp16"] = True
    if generates:
        sleeps = facts.whole("sleep_level") is not None
        found |= {"num_generations": 8, "max_completion_length": 512, "beta": 0.04}
        found |= {"vllm_gpu_memory_utilization": 0.9, "vllm_enable_sleep_mode": sleeps}
    return found


def swift_samples(facts: Facts) -> int | None:
    """What `dataset: [org/name#500, …]` says of the number of samples, where each says one."""
    value = facts.get("dataset")
    names = value if isinstance(value, list) else [value]
    found = [_SWIFT_STATED.search(name) for name in names if isinstance(name, str)]
    return sum(int(one[1]) for one in found if one) if found and all(found) else None


def is_unsloth(facts: Facts) -> bool:
    """FastLanguageModel's own value for checkpointing, or a tool that is told to use it."""
    stated = facts.text("use_gradient_checkpointing", "gradient_checkpointing", "tuner_backend", "framework", "backend")
    return (stated or "").lower() == "unsloth" or facts.true("use_unsloth", "unsloth")


def dialect_of(facts: Facts, trainer: str) -> Dialect:
    if is_llama_factory(facts):
        return LLAMA_FACTORY
    if is_swift(facts):
        return MS_SWIFT
    if trainer in ("Trainer", "Seq2SeqTrainer"):
        return PLAIN
    taken = trl_parser_keys(trainer) if trainer in TRAINERS else None
    if taken is None:
        return TRL
    gone = {key: new if new in taken.keys else None for key, new in RENAMED.items() if key not in taken.keys}
    gone |= {key: None for key in trl_keys(trainer) if key not in taken.keys and key not in gone}
    return replace(TRL, gone=gone, version=taken.version)


_MIXED: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "16", "16-mixed", "float16"), "fp16"),
}
"""What scripts call mixed precision: accelerate's `mixed_precision`, Lightning's `precision`."""


_MIXES = ("mixed_precision", "mix_precision", "use_mixed_precision", "amp", "use_amp", "enable_amp")


def unsaid_mix(facts: Facts) -> str | None:
    """The key of a script's file that asks for mixed precision without saying in which type."""
    return next((key for key in _MIXES if facts.true(key)), None)


def _is_unmixed(facts: Facts) -> bool:
    """A script's file that wants none: it hands on what TRL would turn on."""
    stated = (facts.text("mixed_precision", "mix_precision") or "").lower()
    return facts.false("mixed_precision", "mix_precision", "use_mixed_precision") or stated in ("no", "none", "fp32", "float32")


def implied(dialect: Dialect, facts: Facts, args: Mapping[str, Any], world_size: int = 1, *, has_bf16: bool = True) -> dict[str, Any]:
    """Arguments in force that the file need not name."""
    if dialect is LLAMA_FACTORY:  # it checkpoints unless it is told not to
        if facts.true("disable_gradient_checkpointing"):
            return {"gradient_checkpointing": False}
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": not facts.false("use_reentrant_gc")}}
    if dialect is MS_SWIFT:
        return swift_defaults(facts, args, world_size)
    found = _of_a_whole_batch(facts, args, world_size) | _evaluated_by_a_script(facts, args)
    on_cpu = "cpu" in {str(value).lower() for _, value in facts.all("device", "device_map", "accelerator", not_under=_ELSEWHERE)}
    if (on_cpu or facts.false("use_gpu", "use_cuda")) and "use_cpu" not in args:
        found["use_cpu"] = True
    given = facts.get("deepspeed_config", "deepspeed_config_file", "ds_config", "deepspeed")
    if "deepspeed" not in args and (_is_zero(given) or (isinstance(given, str) and given.endswith(".json"))):
        found["deepspeed"] = given
    mixed = _MIXED.get((facts.text("mixed_precision", "mix_precision", "precision") or "").lower())
    if mixed is None and unsaid_mix(facts) is not None:
        mixed = "bf16" if has_bf16 else "fp16"
    if mixed is not None and not {"fp16", "bf16"} & args.keys():
        found[mixed] = True
    if dialect.name == TRL.name:
        defaults = _trl_defaults(fp16=args.get("fp16") is True or found.get("fp16") is True)
        if _is_unmixed(facts):
            defaults.pop("bf16", None)
        return defaults | found | ({"gradient_checkpointing": True} if is_unsloth(facts) else {})
    return found | _of_seq2seq_script(facts, args)


def _is_zero(config: Any) -> bool:
    """A DeepSpeed config that a script hands on."""
    return isinstance(config, Mapping) and "zero_optimization" in config


_MICRO = ("micro_batch_size", "train_micro_batch_size", "train_micro_batch_size_per_gpu", "micro_batch_size_per_device")


_ELSEWHERE = ("reward", "reward_model", "judge", "embedding", "embeddings", "retriever", "evaluation", "eval", "inference", "preprocessing")


def _of_a_whole_batch(facts: Facts, args: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """A script that is told the batch of a whole step, and that of a device, accumulates the rest."""
    micro = args.get(BATCH)
    if ACCUMULATION in args or not isinstance(micro, int) or micro < 1:
        return {}
    whole = facts.whole(*WHOLE_BATCHES) or (facts.whole(*MAYBE_WHOLE) if facts.whole(*_MICRO) == micro else None)
    steps, rest = divmod(whole or 0, micro * world_size)
    return {ACCUMULATION: steps} if steps > 1 and rest == 0 else {}


_EVALUATED = (
    *("eval_file", "eval_path", "eval_jsonl", "eval_data", "eval_data_path", "eval_data_file", "eval_dataset_path", "eval_manifest"),
    *("val_file", "val_path", "val_data", "val_data_path", "dev_file", "dev_path", "valid_file", "valid_path", "validation_path"),
    *("val_jsonl", "valid_jsonl", "dev_jsonl", "validation_dataset_path", "val_dataset_path", "eval_data_files", "val_manifest"),
)
_HELD_BACK = (  # a share or a number of the samples
    *("val_ratio", "eval_ratio", "validation_ratio", "val_size", "eval_size", "validation_size", "val_split", "eval_split_ratio"),
    *("val_split_ratio", "validation_split_ratio", "val_fraction", "eval_fraction", "validation_fraction"),
)
_EVALUATIONS = ("load_best_model_at_end", "metric_for_best_model", "per_device_eval_batch_size")  # arguments that speak of one


def _evaluated_by_a_script(facts: Facts, args: Mapping[str, Any]) -> dict[str, Any]:
    """`eval_steps` beside data to evaluate on under a script's own name, a best model or a batch for it: the script adds the strategy."""
    steps, told = args.get("eval_steps"), {"eval_strategy", "do_eval", "do_train"} & args.keys()
    counted = facts.whole("num_eval_samples", "max_eval_samples", "eval_samples", "num_val_samples") or facts.number(*_HELD_BACK)
    meant = any(args.get(key) for key in _EVALUATIONS) or counted or facts.text(*_EVALUATED) is not None
    return {"eval_strategy": "steps"} if isinstance(steps, int | float) and meant and not told else {}


def _of_seq2seq_script(facts: Facts, args: Mapping[str, Any]) -> dict[str, Any]:
    """What transformers' run_summarization.py and run_translation.py hand on to the generation of an evaluation."""
    said = {"generation_num_beams": facts.whole("num_beams"), "generation_max_length": facts.whole("val_max_target_length")}
    return {key: value for key, value in said.items() if value is not None} if args.get("predict_with_generate") is True else {}


def trl_dtype() -> str | None:
    """What the installed TRL loads a model in when it is not told; without TRL here what it does from 1.0 on."""
    source = _trl_source("model_config")
    stated = re.search(r"^    (?:torch_)?dtype: .*?default=(None|\"\w+\")", source, re.MULTILINE | re.DOTALL) if source else None
    return "float32" if stated is None else None if stated[1] == "None" else stated[1].strip('"')


def _trl_source(name: str) -> str:
    folder = source_folder("trl")
    path = None if folder is None else folder / "trainer" / f"{name}.py"
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""


def _trl_defaults(*, fp16: bool) -> dict[str, Any]:
    """What the installed TRL sets otherwise than TrainingArguments, from its source; without TRL here nothing is known."""
    sources = [_trl_source(f"{name}_config") for name in ("base", "sft")]
    defaults: dict[str, Any] = {}
    if any(re.search(r"gradient_checkpointing: bool = field\(\s*default=True", source) for source in sources):
        defaults["gradient_checkpointing"] = True
    if not fp16 and any("self.bf16 = not (self.fp16)" in source for source in sources):
        defaults["bf16"] = True
    return defaults


Mark = Callable[[dict[Any, Any]], bool]


def _has(*keys: str, of: int | None = None) -> Mark:
    return lambda data: sum(key in data for key in keys) >= (len(keys) if of is None else of)


def _any_component(data: dict[Any, Any]) -> bool:
    return any(isinstance(value, dict) and "_component_" in value for value in data.values())


def _switches(data: dict[Any, Any]) -> bool:
    """`fp16: {enabled: true}` or an optimizer with `type` and `params`: DeepSpeed's way."""
    halves = any(isinstance(data.get(key), dict) and "enabled" in data[key] for key in ("fp16", "bf16"))
    optimizer, of_a_job = data.get("optimizer"), {"model", "dataset", "data", "training"} & data.keys()
    return halves or (not of_a_job and isinstance(optimizer, dict) and {"type", "params"} <= optimizer.keys())


# Source of each row: the tool's own documentation of its config file.
_TOOLS: tuple[tuple[str, Mark], ...] = (
    ("accelerate (`accelerate config`)", lambda data: "compute_environment" in data or _has("distributed_type", "num_processes")(data)),
    ("torchtune", _any_component),
    ("DeepSpeed", _has("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer", of=2)),
    ("DeepSpeed", lambda data: "zero_optimization" in data and "learning_rate" not in data),
    ("DeepSpeed", _switches),
    (
        "SetFit, which trains pairs of sentences by arguments of its own",
        lambda data: (
            _has("body_learning_rate", "head_learning_rate", of=1)(data)
            or ("num_iterations" in data and any("sentence-transformers/" in value for value in data.values() if isinstance(value, str)))
        ),
    ),
    ("ludwig", lambda data: _has("input_features", "output_features", of=1)(data)),
    ("LLaMA-Factory v1, which trains by a loop of its own", _has("dist_config", "kernel_config", "sample_backend", "model_class", of=2)),
    (
        "Megatron-SWIFT, whose engine is Megatron's own",
        lambda data: _has("micro_batch_size", "global_batch_size")(data) and _has("tuner_type", "train_type", "rlhf_type", of=1)(data),
    ),
    ("nanotron", lambda data: isinstance(data.get("parallelism"), dict) and isinstance(data.get("tokens"), dict)),
    ("verl", _has("actor_rollout_ref")),
    ("EasyR1", lambda data: isinstance(data.get("algorithm"), dict) and "adv_estimator" in data["algorithm"]),
    ("verl", lambda data: isinstance(data.get("model"), dict) and "partial_pretrain" in data["model"]),
    ("NeMo RL", lambda data: isinstance(data.get("policy"), dict) and isinstance(data.get("cluster"), dict)),
    ("trlx", lambda data: isinstance(data.get("train"), dict) and isinstance(data.get("method"), dict) and "optimizer" in data),
    ("llm-foundry", _has("max_duration", "device_train_microbatch_size", "global_train_batch_size", of=2)),
    ("mergekit", _has("merge_method", "slices", "models", of=2)),
    ("NeMo", lambda data: isinstance(data.get("trainer"), dict) and "exp_manager" in data),
    ("Lightning (LightningCLI)", lambda data: isinstance(data.get("model"), dict) and "class_path" in data["model"]),
    ("litgpt", lambda data: "checkpoint_dir" in data and isinstance(data.get("train"), dict) and "global_batch_size" in data["train"]),
    ("Kubernetes", _has("apiVersion", "kind")),
    ("GitHub Actions", lambda data: "jobs" in data and ("on" in data or True in data)),
    ("docker compose", lambda data: isinstance(data.get("services"), dict)),
)


AXOLOTL_MARKS = ("sequence_len", "micro_batch_size", "adapter", "val_set_size", "sample_packing", "model_type", "special_tokens")
_ALPACA_LORA = frozenset({"cutoff_len", "data_path"})  # its own keys; it also has base_model and micro_batch_size


def is_axolotl(data: Mapping[Any, Any]) -> bool:
    """`base_model` with a list of typed datasets, or with two keys that only axolotl has."""
    if "base_model" not in data or BATCH in data or _ALPACA_LORA & data.keys():
        return False
    datasets = data.get("datasets")
    typed = isinstance(datasets, list) and any(isinstance(item, dict) and {"path", "type"} <= item.keys() for item in datasets)
    return typed or sum(key in data for key in AXOLOTL_MARKS) >= 2


def tool_of(data: dict[Any, Any]) -> str | None:
    """The tool whose config this is, None when it may be ours."""
    if BATCH in data:
        return None
    return next((tool for tool, mark in _TOOLS if mark(data)), None)
