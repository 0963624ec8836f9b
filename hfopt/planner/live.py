"""Planning from Python: a Trainer, or a TrainingArguments with a model or a model id, becomes the same subject a YAML does."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

from hfopt.errors import ConfigError
from hfopt.planner.live_device import live_hardware
from hfopt.planner.live_rules import data_parallel_world, feeding_limits, kept_keys, kind_of
from hfopt.planner.request import Request, Subject, hardware_of, workload_of
from hfopt.schema import DataSpec, ModelSpec, TrainJob


def from_live(source: Any, request: Request) -> Subject:
    """`source` is a Trainer, or a TrainingArguments when `request.model` names the model."""
    if dataclasses.is_dataclass(source) and hasattr(source, "per_device_train_batch_size"):
        return _from_arguments(source, request)
    if hasattr(source, "args") and hasattr(source, "model"):
        return _from_trainer(source, request)
    raise ConfigError(
        f"a {type(source).__name__} cannot be planned", hint="give a path to a YAML, a TrainingArguments with model=..., or a Trainer"
    )


def _from_arguments(args: Any, request: Request) -> Subject:
    if request.model is None:
        raise ConfigError("which model is trained is not stated", hint="hfopt.plan(args, model='bert-base-uncased')")
    hardware = hardware_of(request)
    model = ModelSpec(name=request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    job = _job(args, request, model=model, data=DataSpec(max_length=request.seq_len), world=max(1, len(hardware.gpus)))
    return Subject(job=job, workload=workload_of(job), hardware=hardware)


def _from_trainer(trainer: Any, request: Request) -> Subject:
    from hfopt.model.from_trainer import collator_of, from_trainer

    hardware = live_hardware(trainer, request)
    workload = from_trainer(trainer)
    world = data_parallel_world(trainer) if not hardware.hypothetical else max(1, len(hardware.gpus))
    job = _job(trainer.args, request, model=ModelSpec(name=workload.name), data=DataSpec(samples=_samples(trainer)), world=world)
    kept, feeding = kept_keys(trainer), feeding_limits(trainer)
    job = replace(
        job,
        trainer=kind_of(trainer),
        args={**job.args, **_in_force(trainer)},
        kept=job.kept | kept.keys | feeding.keys,
    )
    return Subject(
        job=job,
        workload=workload,
        hardware=hardware,
        dataset=trainer.train_dataset,
        collate=collator_of(trainer),
        most_workers=feeding.most_workers,
        notes=(*kept.notes, *feeding.notes),
        trainer=trainer,
    )


def _job(args: Any, request: Request, *, model: ModelSpec, data: DataSpec, world: int) -> TrainJob:
    """Only what differs from the Trainer's own defaults counts as set, as in a YAML; a subclass may have others (TRL's do)."""
    from transformers import TrainingArguments

    defaults = {item.name: item.default for kind in (type(args), TrainingArguments) for item in dataclasses.fields(kind)}
    values = {item.name: _plain(getattr(args, item.name, None)) for item in dataclasses.fields(args) if item.init}
    stated = {name: value for name, value in values.items() if value is not None and value != _plain(defaults.get(name))}
    return TrainJob(
        path=None,
        section=(),
        trainer="Trainer",
        args=stated,
        model=model,
        data=data,
        per_device_batch=int(args.per_device_train_batch_size),
        accumulation=int(args.gradient_accumulation_steps),
        world_size=world,
        kept=request.keep,
    )


def _in_force(trainer: Any) -> dict[str, Any]:
    """What the Trainer does whatever its arguments say: a launcher's precision, checkpointing switched on by hand."""
    found: dict[str, Any] = {}
    precision = getattr(getattr(trainer.accelerator, "state", None), "mixed_precision", "no")
    if precision in ("bf16", "fp16"):
        found[precision] = True
    if getattr(trainer.model, "is_gradient_checkpointing", False):
        found["gradient_checkpointing"] = True
    return found


def _plain(value: Any) -> Any:
    """Enums as the words a YAML has."""
    return getattr(value, "value", value)


def _samples(trainer: Any) -> int | None:
    data = trainer.train_dataset
    return len(data) if hasattr(data, "__len__") else None
