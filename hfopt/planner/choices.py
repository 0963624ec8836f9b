"""What may be chosen for this job on this device: the config's own settings as a candidate, and the space around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hfopt.config.settings import checkpointing_of, default_optim, precision_of
from hfopt.facts.training_keys import installed
from hfopt.planner.batch_rules import batch_rule
from hfopt.planner.changes import CHECKPOINTING_KEYS, PRECISION_KEYS
from hfopt.planner.device import Device
from hfopt.planner.kernels_on_offer import attention_choices, liger_choices
from hfopt.planner.precision import NumericFacts, Precisions, precisions
from hfopt.planner.request import Request, Subject
from hfopt.planner.space import Space, checkpointing_choices
from hfopt.schema import Candidate, Checkpointing, TrainJob

FUSED = "adamw_torch_fused"


def current_candidate(subject: Subject) -> Candidate:
    job = subject.job
    return Candidate(
        per_device_batch=job.per_device_batch,
        accumulation=job.accumulation,
        precision=precision_of(job.args),
        checkpointing=checkpointing_of(job.args),
        torch_compile=job.args.get("torch_compile") is True,
        use_liger_kernel=job.args.get("use_liger_kernel") is True
        and True in liger_choices(subject, frozenset({"use_liger_kernel"})).values,
    )


def precisions_of(subject: Subject, device: Device, current: Candidate) -> Precisions:
    facts = NumericFacts(
        family=subject.workload.model_class,
        weights_dtype=device.stored_in(subject.workload),
        trained_in=device.trained_in(subject.workload),
    )
    return precisions(device.gpu, current.precision, facts, keep=bool(subject.job.kept.intersection(PRECISION_KEYS)))


def space_of(subject: Subject, request: Request, device: Device, allowed: Precisions, current: Candidate) -> Space:
    job, workload = subject.job, subject.workload
    kept = job.kept
    effective = request.effective_batch or job.effective_batch
    trades = "accumulation" in request.allow or effective != job.effective_batch
    rule = batch_rule(job)
    pinned = not trades and (workload.batch_dependent_loss is not None or rule.keeps_pair)
    compiled = (current.torch_compile,) if "torch_compile" not in request.allow or current.torch_compile else (False, True)
    fused = "optim" in request.allow and "optim" not in kept and (job.args.get("optim") or default_optim()) == "adamw_torch"
    return Space(
        effective_batch=effective,
        world_size=job.world_size,
        precisions=allowed.allowed,
        checkpointings=_checkpointings(subject, current),
        batch=job.per_device_batch if "per_device_train_batch_size" in kept else None,
        accumulation=job.accumulation if pinned or "gradient_accumulation_steps" in kept else None,
        batch_multiple=rule.multiple,
        batch_divides=rule.divides,
        optims=(None, FUSED) if fused else (None,),
        attention=attention_choices(subject, request.allow, device.gpu).values,
        compiled=compiled,
        liger=liger_choices(subject, request.allow).values if not current.use_liger_kernel else (True,),
    )


def likely(pool: Sequence[Candidate], device: Device, current: Candidate) -> tuple[Candidate, ...]:
    """Which traces the search will ask for first: the largest batch, unchecked, in the fastest precision; who checkpoints all layers mostly
    has to check some, and who accumulates mostly has to."""
    rate = device.speed.matmul_flops
    accumulates = current.accumulation > 1

    def rank(c: Candidate) -> tuple[object, ...]:
        as_now = (c.accumulation > 1) == accumulates
        return not c.checkpointing.on, rate.get(c.precision, 0.0), as_now, c.per_device_batch, -c.torch_compile, not c.use_liger_kernel

    graded = [c for c in pool if c.checkpointing.every_n_layers > 1] if current.checkpointing.on else []
    return tuple(max(some, key=rank) for some in (pool, graded) if some)


def defaults() -> dict[str, Any]:
    """The Trainer's, with the one that it decides while its class is made."""
    return {name: item.default for name, item in installed().fields.items()} | {"optim": default_optim()}


def _checkpointings(subject: Subject, current: Candidate) -> tuple[Checkpointing, ...]:
    job, workload = subject.job, subject.workload
    if job.kept.intersection(CHECKPOINTING_KEYS):
        return (current.checkpointing,)
    return checkpointing_choices(current.checkpointing, possible=workload.checkpointable, graded=_graded(job), layers=workload.layers)


def _graded(job: TrainJob) -> bool:
    """every_n_layers is known to transformers from 5.22 on."""
    return tuple(int(part) for part in installed().version.split(".")[:2]) >= (5, 22)
