"""The first line of the log: what runs on what, with which versions; never a token, a host name or a path that is not the run's."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hfopt.redact import scrub
from hfopt.schema import Gpu

_PACKAGES = ("hfopt", "torch", "transformers", "accelerate", "datasets", "peft", "trl", "nvidia-ml-py")
_ADVISABLE = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "bf16",
    "fp16",
    "torch_compile",
    "deepspeed",
    "fsdp",
    "dataloader_num_workers",
    "dataloader_prefetch_factor",
    "dataloader_pin_memory",
    "dataloader_persistent_workers",
    "group_by_length",
    "train_sampling_strategy",
    "eval_strategy",
    "logging_strategy",
    "save_strategy",
)


def config(args: Any) -> dict[str, Any]:
    """The arguments that are set, every credential hidden."""
    return {key: scrub(value, key) for key, value in args.to_dict().items() if value is not None}


def advisable(args: Any, state: Any) -> dict[str, Any]:
    """The arguments a finding may want to change, with plain values; intervals in steps as the Trainer resolved them."""
    found = {key: getattr(getattr(args, key), "value", getattr(args, key)) for key in _ADVISABLE if hasattr(args, key)}
    for key in ("eval_steps", "logging_steps", "save_steps"):
        found[key] = getattr(state, key, None) or getattr(args, key, None)
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": sys.platform}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cards(gpus: Sequence[Gpu], uuids: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "power_limit_w": gpu.power_limit_w, "uuid": uuid}
        for gpu, uuid in zip(gpus, uuids, strict=False)
    ]
