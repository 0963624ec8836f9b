"""What is determined once when training begins, and the log's first line, which records it.

The first line of the log: what runs on what, with which versions; never a token, a host name or a path that is not the run's.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.compat.torch_patches import tf32_is_on
from hfopt.compat.versions import package_version
from hfopt.facts.gradient_growth import class_grows_with_accumulation, words
from hfopt.monitor.sampler import OwnCards, open_cards_in_time, torch_uuids
from hfopt.monitor.window import Scale, cpu_peak_flops
from hfopt.redact import scrub
from hfopt.schema import Change, Gpu, RunFacts

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
    return found | {package: known for package in _PACKAGES if (known := package_version(package)) is not None}


def cards(gpus: Sequence[Gpu], uuids: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "power_limit_w": gpu.power_limit_w, "uuid": uuid}
        for gpu, uuid in zip(gpus, uuids, strict=False)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlace:
    """Where this rank trains."""

    cards: OwnCards | None
    gpus: tuple[Gpu, ...]
    uuids: tuple[str, ...]
    cores: float
    why_no_cards: str | None = None


def find_place(args: Any) -> TrainingPlace:
    from hfopt.hardware.detect import host

    uuids, cores = torch_uuids(args), host().cores
    if not uuids:
        return TrainingPlace(cards=None, gpus=(), uuids=(), cores=cores)
    cards = open_cards_in_time(uuids)
    if isinstance(cards, str):
        return TrainingPlace(cards=None, gpus=(), uuids=uuids, cores=cores, why_no_cards=cards)
    return TrainingPlace(cards=cards, gpus=cards.facts(), uuids=uuids, cores=cores)


def scale_of(args: Any, place: TrainingPlace, *, flops_per_token: float | None, flops_per_sample: float | None) -> Scale:
    on_cuda = args.device.type == "cuda"
    indices = range(args.n_gpu) if args.n_gpu > 1 else [args.device.index or 0]
    return Scale(
        samples_per_micro_batch=args.train_batch_size,
        world_size=args.world_size,
        flops_per_token=flops_per_token,
        flops_per_sample=flops_per_sample,
        peak_flops=_peak_flops(args, place),
        synced=not on_cuda or bool(args.logging_nan_inf_filter),
        devices=tuple(indices) if on_cuda else (),
    )


def _peak_flops(args: Any, place: TrainingPlace) -> float | None:
    if args.device.type == "cpu":
        return cpu_peak_flops(torch.bfloat16 if args.bf16 else torch.float32)
    if not place.gpus or len(place.gpus) != len(place.uuids):
        return None
    peaks = [gpu.peak_flops.get(_precision(args)) for gpu in place.gpus]
    return sum(peak for peak in peaks if peak is not None) if None not in peaks else None


def _precision(args: Any) -> str:
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return "tf32" if tf32_is_on() else "fp32"


def facts_of(args: Any, state: Any, place: TrainingPlace, plan: Any, model: Any = None) -> RunFacts:
    changes, gain = planned(plan)
    return RunFacts(
        device=args.device.type,
        cores=place.cores,
        world_size=args.world_size,
        args=advisable(args, state),
        pcie_bytes_per_s=place.gpus[0].pcie_bytes_per_s if place.gpus else None,
        planned=changes,
        planned_gain=gain,
        keeps_accumulation=keeps_accumulation(plan),
        layers=sum(1 for part in model.modules() if next(part.children(), None) is None) if model is not None else None,
    )


def growing_gradients(trainer: Any, plan: Any) -> str | None:
    """What is wrong with a run that accumulates on a head which ignores the number of items; None where a plan has said so already."""
    from transformers import Trainer

    if trainer is None or trainer.args.gradient_accumulation_steps < 2 or getattr(getattr(plan, "facts", plan), "warnings", ()):
        return None
    own_rule = type(trainer).compute_loss is not Trainer.compute_loss or getattr(trainer, "loss_is_scaled_for_ga", None) is not None
    own_loss = getattr(trainer, "compute_loss_func", None) is not None or trainer.label_smoother is not None
    if own_rule or own_loss or not trainer.model_accepts_loss_kwargs:
        return None
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    grows = class_grows_with_accumulation(type(base)) is True
    return words(type(base).__name__, trainer.args.gradient_accumulation_steps) if grows else None


def keeps_accumulation(plan: Any) -> bool:
    found = getattr(getattr(plan, "facts", plan), "neutrality", None)
    return found is not None and not found.neutral


def planned(plan: Any) -> tuple[tuple[Change, ...], float | None]:
    """The changes of a `Plan` (or its `PlanFacts`) and the gain it predicts."""
    facts = getattr(plan, "facts", plan)
    if facts is None:
        return (), None
    before, after = facts.before.time.samples_per_s, facts.after.time.samples_per_s
    return tuple(facts.changes), round(after / before - 1, 2) if before else None
