"""The key table: which keys are TrainingArguments', which went and what replaced them, which are said otherwise, which stand together.

What exists is read from the installed transformers; the table only says what became of what does not.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.facts.training_keys import NEW_SPELLINGS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same module under its old name

BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
ATTENTION = "attn_implementation"  # not an argument of the Trainer, but many files state it beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A key of an older transformers. `to` names its successor, None: simply drop it; `value` maps old values to new ones."""

    to: str | None
    why: str
    values: Mapping[Any, Any] | None = None  # old -> new; the new None drops the key
    inside: str | None = None  # it is an entry of the mapping `to` now
    by_hand: bool = False  # the new place is not one key: told, not done


# Source: transformers' migration guide to v5 and the removals in training_args.py from 4.46 to 5.22.
GONE: dict[str, Gone] = {
    "evaluation_strategy": Gone(to="eval_strategy", why="renamed in 4.46"),
    "warmup_ratio": Gone(to="warmup_steps", why="in v5 a warmup_steps below 1 is the ratio"),
    "group_by_length": Gone(
        to="train_sampling_strategy", why="one of three sampling strategies in v5", values={True: "group_by_length", False: None}
    ),
    "overwrite_output_dir": Gone(to=None, why="v5 never looks into output_dir before it writes"),
    "logging_dir": Gone(to=None, why="v5 takes it from the environment variable TENSORBOARD_LOGGING_DIR"),
    "per_gpu_train_batch_size": Gone(to=BATCH, why="its old name"),
    "per_gpu_eval_batch_size": Gone(to="per_device_eval_batch_size", why="its old name"),
    "no_cuda": Gone(to="use_cpu", why="its old name"),
    "use_mps_device": Gone(to=None, why="Apple's device is found by itself"),
    "push_to_hub_token": Gone(to="hub_token", why="its old name"),
    "push_to_hub_model_id": Gone(to="hub_model_id", why="its old name"),
    "push_to_hub_organization": Gone(to="hub_model_id", why="write organization/name into hub_model_id", by_hand=True),
    "adafactor": Gone(to="optim", why="an optimizer is chosen by `optim`", values={True: "adafactor", False: None}),
    "include_inputs_for_metrics": Gone(to="include_for_metrics", why="a list since 4.46", values={True: ["inputs"], False: None}),
    "include_tokens_per_second": Gone(
        to="include_num_input_tokens_seen", why="it is reported with the tokens seen", values={True: True, False: None}
    ),
    "fp16_backend": Gone(to=None, why="autocast is the only backend left"),
    "half_precision_backend": Gone(to=None, why="autocast is the only backend left"),
    "fp16_opt_level": Gone(to=None, why="Apex is gone"),
    "save_safetensors": Gone(to=None, why="v5 always saves safetensors"),
    "torchdynamo": Gone(to="torch_compile_backend", why="its old name"),
    "jit_mode_eval": Gone(to=None, why="removed with its backend"),
    "use_ipex": Gone(to=None, why="removed with its backend"),
    "tpu_num_cores": Gone(to=None, why="set by the TPU launcher"),
    "tpu_metrics_debug": Gone(to="debug", why="an option of `debug`", values={True: "tpu_metrics_debug", False: None}),
    "past_index": Gone(to=None, why="removed with the models that used it"),
    "ray_scope": Gone(to=None, why="set it in hyperparameter_search"),
    "mp_parameters": Gone(to=None, why="SageMaker model parallelism is gone"),
    "use_legacy_prediction_loop": Gone(to=None, why="there is one prediction loop"),
    "tp_size": Gone(to="parallelism_config", why="tensor parallelism is set in accelerate's ParallelismConfig", by_hand=True),
    "fsdp_min_num_params": Gone(to="fsdp_config", inside="min_num_params", why="an entry of fsdp_config in v5"),
    "fsdp_transformer_layer_cls_to_wrap": Gone(
        to="fsdp_config", inside="transformer_layer_cls_to_wrap", why="an entry of fsdp_config in v5"
    ),
    "sharded_ddp": Gone(to="fsdp", why="fairscale is gone; use fsdp", by_hand=True),
    "xpu_backend": Gone(to="ddp_backend", why="its old name"),
}

# What changes for the training when TRL's parser no longer takes a key.
WITHOUT_IT = {"max_prompt_length": "; prompts are not cut to it any more, so leave longer ones out of the dataset"}

# Values that went while their key stayed: key -> old value -> new value.
GONE_VALUES: dict[str, dict[Any, Any]] = {
    "optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OldSpelling:
    """How an older transformers wrote a newer key."""

    key: str
    values: Mapping[Any, Any] | None = None  # new -> old; a value that is not here has no old one, and the key is dropped

    def say(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(tuple(value) if isinstance(value, list) else value)


# The way back, for a file that an older transformers will read. Source: as for GONE.
BEFORE: dict[str, OldSpelling] = {
    "eval_strategy": OldSpelling(key="evaluation_strategy"),
    "warmup_steps": OldSpelling(key="warmup_ratio"),
    "train_sampling_strategy": OldSpelling(key="group_by_length", values={"group_by_length": True}),
    "include_for_metrics": OldSpelling(key="include_inputs_for_metrics", values={("inputs",): True}),
    **{new: OldSpelling(key=old) for old, new in NEW_SPELLINGS.items()},
}

# Keys that came after 4.40, for configs that are newer than the transformers that reads them (facts/argument_effects.py says since when).
NEWER: dict[str, str] = {
    "train_sampling_strategy": "group_by_length: true",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "liger_kernel_config": "",
    "use_cache": "",
    "project": "",
    "trackio_space_id": "",
    "enable_jit_checkpoint": "",
    "hub_revision": "",
    "parallelism_config": "",
    "dataloader_multiprocessing_context": "",
    "dataloader_in_order": "",
    "ddp_static_graph": "",
    "trackio_bucket_id": "",
    "trackio_static_space_id": "",
    "average_tokens_across_devices": "",
    "batch_eval_metrics": "",
    "eval_on_start": "",
    "eval_use_gather_object": "",
    "include_for_metrics": "",
    "restore_callback_states_from_checkpoint": "",
    "torch_empty_cache_steps": "",
    "use_liger_kernel": "",
}

# What other scripts call the same thing. Taken only where the real key is not set.
ALIASES: dict[str, str] = {
    "batch_size": BATCH,
    "train_batch_size": BATCH,
    "train_batch": BATCH,
    "per_device_batch_size": BATCH,
    "per_gpu_batch_size": BATCH,
    "micro_batch_size": BATCH,
    "batch_size_per_device": BATCH,
    "batch_size_per_gpu": BATCH,
    "device_batch_size": BATCH,
    "max_per_device_train_batch_size": BATCH,
    "per_device_train_bs": BATCH,
    "micro_train_batch_size": BATCH,
    "train_micro_batch_size": BATCH,
    "train_bs": BATCH,
    "eval_batch_size": "per_device_eval_batch_size",
    "gradient_accumulation": ACCUMULATION,
    "grad_accumulation_steps": ACCUMULATION,
    "grad_accum_steps": ACCUMULATION,
    "grad_accum": ACCUMULATION,
    "accumulation_steps": ACCUMULATION,
    "accumulate_grad_batches": ACCUMULATION,
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "n_epochs": "num_train_epochs",
    "max_epochs": "num_train_epochs",
    "max_train_steps": "max_steps",
    "lr_scheduler": "lr_scheduler_type",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
    "num_workers": "dataloader_num_workers",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "warmup": "warmup_steps",
    "num_warmup_steps": "warmup_steps",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "logging_freq": "logging_steps",
    "eval_freq": "eval_steps",
    "save_freq": "save_steps",
    "enable_liger_kernel": "use_liger_kernel",
    "use_liger": "use_liger_kernel",
}

# Of several aliases in one section these count last: beside a `micro_batch_size` they are the batch of a whole step.
MAYBE_WHOLE = ("batch_size", "train_batch_size")
WHOLE_BATCHES = ("global_batch_size", "total_batch_size", "effective_batch_size", "total_train_batch_size", "global_train_batch_size")

# Aliases that a tool of its own reads: right as they are, so not worth a word.
QUIET_ALIASES = frozenset({"enable_liger_kernel", "use_liger"})

# Values TrainingArguments takes though its annotation does not say so.
ALSO_TAKES: dict[str, frozenset[str]] = {"fsdp": frozenset({"bool", "list"}), "report_to": frozenset({"list"})}

# Which keys belong together, so that a new one is written beside its kin: the first that the section has is the neighbour.
_KIN: tuple[tuple[str, ...], ...] = (
    (BATCH, ACCUMULATION, "per_device_eval_batch_size", "eval_accumulation_steps", "auto_find_batch_size"),
    ("micro_batch_size", ACCUMULATION, "eval_batch_size"),  # axolotl's names
    (*NEW_SPELLINGS.values(), *NEW_SPELLINGS, ACCUMULATION, BATCH),
    ("bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval", "torch_dtype", "dtype", BATCH),
    (
        "dataloader_num_workers",
        "dataloader_prefetch_factor",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_drop_last",
        "dataloader_multiprocessing_context",
        ACCUMULATION,
        BATCH,
    ),
    ("optim", "optim_args", "learning_rate", "weight_decay"),
    ("attn_implementation", "torch_dtype", "dtype", "model_name_or_path"),
    ("torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "bf16", "fp16"),
    ("eval_strategy", "eval_steps"),
    ("warmup_steps", "lr_scheduler_type", "learning_rate"),
)


def kin(key: str) -> tuple[str, ...]:
    """The neighbours of a key, nearest first."""
    return tuple(other for group in _KIN if key in group for other in group if other != key)


@cache
def _known_keys() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_name("known_keys.toml").read_text(encoding="utf-8"))
    return table


@cache
def known_elsewhere() -> frozenset[str]:
    """Keys of other argument classes that share a file with TrainingArguments."""
    groups = [group for table in _known_keys().values() for group in ([table] if "keys" in table else table.values())]
    return frozenset(key for group in groups for key in group["keys"])


def trl_keys(trainer: str) -> frozenset[str]:
    """The keys that TRL's config of this trainer adds to TrainingArguments; "script": those of the scripts' other classes."""
    tables = _known_keys()["trl"]
    if trainer in ("RLOO", "ORPO", "CPO"):
        return frozenset(tables["other"]["keys"]) | frozenset(tables["GRPO" if trainer == "RLOO" else "DPO"]["keys"])
    return frozenset(tables.get(trainer, {"keys": ()})["keys"])
