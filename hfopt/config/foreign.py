"""Configs of other tools, recognised by keys that only they have, so that they are refused by name and not half understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfopt.config.keys import BATCH

Mark = Callable[[dict[Any, Any]], bool]


def _has(*keys: str, of: int | None = None) -> Mark:
    return lambda data: sum(key in data for key in keys) >= (len(keys) if of is None else of)


def _any_component(data: dict[Any, Any]) -> bool:
    return any(isinstance(value, dict) and "_component_" in value for value in data.values())


def _switches(data: dict[Any, Any]) -> bool:
    """`fp16: {enabled: true}` or an optimizer with `type` and `params`: DeepSpeed's way."""
    halves = any(isinstance(data.get(key), dict) and "enabled" in data[key] for key in ("fp16", "bf16"))
    optimizer = data.get("optimizer")
    return halves or (isinstance(optimizer, dict) and {"type", "params"} <= optimizer.keys())


def _typed_datasets(data: dict[Any, Any]) -> bool:
    datasets = data.get("datasets")
    return isinstance(datasets, list) and any(isinstance(item, dict) and {"path", "type"} <= item.keys() for item in datasets)


# Source of each row: the tool's own documentation of its config file.
_TOOLS: tuple[tuple[str, Mark], ...] = (
    ("accelerate (`accelerate config`)", lambda data: "compute_environment" in data or _has("distributed_type", "num_processes")(data)),
    ("torchtune", _any_component),
    ("DeepSpeed", _has("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer", of=2)),
    ("DeepSpeed", lambda data: "zero_optimization" in data and "learning_rate" not in data),
    ("DeepSpeed", _switches),
    ("ludwig", lambda data: _has("input_features", "output_features", of=1)(data)),
    ("axolotl", lambda data: "base_model" in data and _typed_datasets(data)),
    (
        "axolotl",
        lambda data: (
            "base_model" in data
            and _has("sequence_len", "micro_batch_size", "adapter", "val_set_size", "sample_packing", "model_type", "special_tokens", of=2)(
                data
            )
        ),
    ),
    ("llm-foundry", _has("max_duration", "device_train_microbatch_size", "global_train_batch_size", of=2)),
    ("mergekit", _has("merge_method", "slices", "models", of=2)),
    ("NeMo", lambda data: isinstance(data.get("trainer"), dict) and "exp_manager" in data),
    ("Lightning (LightningCLI)", lambda data: isinstance(data.get("model"), dict) and "class_path" in data["model"]),
    ("litgpt", lambda data: "checkpoint_dir" in data and isinstance(data.get("train"), dict) and "global_batch_size" in data["train"]),
    ("Kubernetes", _has("apiVersion", "kind")),
    ("GitHub Actions", lambda data: "jobs" in data and ("on" in data or True in data)),
    ("docker compose", lambda data: isinstance(data.get("services"), dict)),
)


def tool_of(data: dict[Any, Any]) -> str | None:
    """The tool whose config this is, None when it may be ours."""
    if BATCH in data:
        return None
    return next((tool for tool, mark in _TOOLS if mark(data)), None)
