"""The algorithm on one page: read, trace, search, price, explain.

1. The effective batch is fixed, unless the user asked for another.
2. Every exact divisor × precision × checkpointing is a candidate; what the user keeps is pinned.
3. Best-first: bounds first, a trace only for what could win, memory by replay; the fastest that fits wins.
4. The loader is sized for the winner's demand; every change gets its reason.
5. Where a device is here, the winner is tried on it, and what was measured is shown beside what was predicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hfopt.config.installed import installed
from hfopt.config.step import checkpointing_of, precision_of
from hfopt.planner.advice import advice
from hfopt.planner.ahead import Estimator
from hfopt.planner.charts import charts
from hfopt.planner.device import Device, device_of
from hfopt.planner.devices import plan_devices
from hfopt.planner.feeding import Feeding
from hfopt.planner.pricing import Pricing
from hfopt.planner.remedies import nothing_fits
from hfopt.planner.request import Progress, Request, Subject, from_file
from hfopt.planner.result import Plan
from hfopt.planner.trials import Tried, tried
from hfopt.schema import Candidate, Neutrality, PlanFacts, Priced, Rejection, TrainJob
from hfopt.search.best import Found, best_first
from hfopt.search.changes import CHECKPOINTING_KEYS, PRECISION_KEYS, Outcome, Setting, changes
from hfopt.search.precision import NumericFacts, Precisions, precisions
from hfopt.search.space import Space, candidates, checkpointing_choices

ALTERNATIVES = 24
CPU_TIMINGS = 3


def plan(
    source: Any,
    request: Request | None = None,
    *,
    progress: Progress = lambda text: None,
    estimator: Estimator | None = None,
    **options: Any,
) -> Plan:
    """The fastest settings that fit. `source` is a path to a YAML, a TrainingArguments (with `model=`), or a Trainer;
    `options` are the fields of `Request`."""
    started = time.perf_counter()
    request = replace(request or Request(), **options)
    if isinstance(source, (str, Path)):
        subject = from_file(Path(source), request)
    else:
        from hfopt.planner.live import from_live

        subject = from_live(source, request)
    read_s = time.perf_counter() - started
    made = plan_devices(subject, request, lambda one: plan_subject(one, request, progress=progress, estimator=estimator))
    return replace(made, seconds={"read": read_s, "plan": time.perf_counter() - started - read_s})


def plan_subject(subject: Subject, request: Request, *, progress: Progress = lambda text: None, estimator: Estimator | None = None) -> Plan:
    """The same for what is already read; `hfopt compare` asks it once per card with one estimator."""
    job, workload = subject.job, subject.workload
    device = device_of(subject, request)
    effective = request.effective_batch or job.effective_batch
    current = _current(subject)
    allowed = _precisions(subject, device, current)
    space = _space(subject, request, effective, allowed, current)
    pricing = device.pricing(workload, estimator, progress)

    pricing.expect(_likely(candidates(space), device))
    pricing.time(current)  # the config's own trace is needed in any case, and bounds what shares it
    found = best_first(candidates(space), pricing, device.budget_bytes, current=current)
    neutrality = _neutrality(subject, request, space, found, progress)
    if neutrality is not None and not neutrality.neutral and "accumulation" not in request.allow:
        found = _with_accumulation(job.accumulation, space, pricing, found, current)
    if not found.ranked:
        raise nothing_fits(subject, device, pricing, found)
    feeding = Feeding(subject=subject, host=subject.hardware.host, ranks=job.world_size, on_gpu=device.gpu is not None)
    verdict = tried(found.ranked, lambda c: device.dry_run(subject, request, c, progress), timings=CPU_TIMINGS if device.gpu is None else 1)
    winner, winner_time = found.ranked[verdict.chosen]
    before = feeding.chosen(current, pricing.time(current), pricing.memory(current), fits=pricing.fits(current), loader=feeding.current())
    after = feeding.chosen(winner, winner_time, pricing.memory(winner), fits=True, loader=feeding.planned(winner, winner_time))

    outcome = Outcome(
        before=before,
        after=after,
        effective_batch=effective,
        budget_bytes=device.budget_bytes,
        device=device.name,
        eval_batch=_eval_batch(subject, pricing, winner),
        learning_rate=_learning_rate(subject, request, effective),
    )
    setting = Setting(args=job.args, defaults=_defaults(), kept=job.kept)
    facts = PlanFacts(
        job=job,
        hardware=subject.hardware,
        effective_batch=effective,
        budget_bytes=device.budget_bytes,
        before=before,
        after=after,
        changes=changes(setting, outcome),
        alternatives=_alternatives(found, pricing, winner),
        rejected=found.rejected,
        trial=verdict.trial,
        neutrality=neutrality,
        notes=(*_notes(subject, device, allowed, pricing, winner), *_failures(verdict)),
    )
    return Plan(
        facts=replace(facts, advice=advice(facts, pricing, winner_time)),
        loaded=subject.loaded,
        charts=charts(pricing, space, winner, device.gpu),
        trial_runs=verdict.runs,
    )


# ---------------------------------------------------------------------------------------------- the pieces of the space


def _current(subject: Subject) -> Candidate:
    job = subject.job
    return Candidate(
        per_device_batch=job.per_device_batch,
        accumulation=job.accumulation,
        precision=precision_of(job.args),
        checkpointing=checkpointing_of(job.args),
        torch_compile=job.args.get("torch_compile") is True,
    )


def _precisions(subject: Subject, device: Device, current: Candidate) -> Precisions:
    facts = NumericFacts(
        family=subject.workload.model_class,
        weights_dtype=device.weights_dtype(subject.workload) or subject.workload.weights_dtype,
        trained_in=device.trained_in(subject.workload),
    )
    return precisions(device.gpu, current.precision, facts, keep=bool(subject.job.kept.intersection(PRECISION_KEYS)))


def _space(subject: Subject, request: Request, effective: int, allowed: Precisions, current: Candidate) -> Space:
    job, workload = subject.job, subject.workload
    kept = job.kept
    trades = "accumulation" in request.allow or effective != job.effective_batch
    pinned = not trades and workload.batch_dependent_loss is not None
    keeps_checkpointing = bool(kept.intersection(CHECKPOINTING_KEYS))
    choices = (
        (current.checkpointing,)
        if keeps_checkpointing
        else checkpointing_choices(current.checkpointing, possible=workload.checkpointable, graded=_graded(job), layers=workload.layers)
    )
    compiled = (current.torch_compile,) if "torch_compile" not in request.allow or current.torch_compile else (False, True)
    fused = "optim" in request.allow and job.args.get("optim", _defaults().get("optim")) == "adamw_torch"
    return Space(
        effective_batch=effective,
        world_size=job.world_size,
        precisions=allowed.allowed,
        checkpointings=choices,
        batch=job.per_device_batch if "per_device_train_batch_size" in kept else None,
        accumulation=job.accumulation if pinned or "gradient_accumulation_steps" in kept else None,
        batch_multiple=int(job.args.get("num_generations") or 8) if job.trainer == "GRPO" else 1,
        optims=(None, "adamw_torch_fused") if fused else (None,),
        compiled=compiled,
    )


def _neutrality(subject: Subject, request: Request, space: Space, found: Found, progress: Progress) -> Neutrality | None:
    """Asked only when the best candidate would trade batch for accumulation and nobody allowed that: it takes a second of real steps."""
    trades = bool(found.ranked) and found.ranked[0][0].accumulation != subject.job.accumulation
    if not trades or space.accumulation is not None or space.effective_batch != subject.job.effective_batch:
        return None
    if subject.trainer is not None:  # asked even where it is allowed: the run may be repaired
        from hfopt.verify.live_neutrality import probe_live

        return probe_live(subject.trainer) or _unknown(subject)
    if "accumulation" in request.allow or subject.loaded is None:
        return None
    from hfopt.verify.neutrality import probe

    progress("asking whether batch may be traded for accumulation")
    return probe(subject.job, subject.workload)


def _unknown(subject: Subject) -> Neutrality:
    """A live loss that cannot be asked is not traded on: the run is real."""
    return Neutrality(
        model_class=subject.workload.model_class,
        transformers_version=installed().version,
        neutral=False,
        ratio=1.0,
        fixable=False,
        reason=f"{subject.workload.model_class}: its loss could not be asked whether it is neutral to accumulation",
    )


def _with_accumulation(accumulation: int, space: Space, pricing: Pricing, free: Found, current: Candidate) -> Found:
    """The search again with the config's accumulation; where that does not fit, the free answer stands, and the advice says so."""
    kept = best_first(candidates(replace(space, accumulation=accumulation)), pricing, pricing.budget_bytes, current=current)
    if not kept.ranked:
        return free
    reason = f"would change the gradients: the model is not neutral to accumulation, which stays at {accumulation}"
    traded = tuple(Rejection(candidate=c, reason=reason) for c, _ in free.ranked if c.accumulation != accumulation)
    return Found(ranked=kept.ranked, rejected=(*traded, *kept.rejected))


def _likely(pool: Sequence[Candidate], device: Device) -> Candidate:
    """Which trace the search will ask for first: the largest batch, unchecked, in the fastest precision."""
    rate = device.speed.matmul_flops
    return max(pool, key=lambda c: (not c.checkpointing.on, rate.get(c.precision, 0.0), c.per_device_batch, -c.torch_compile))


def _defaults() -> dict[str, Any]:
    return {name: item.default for name, item in installed().fields.items()}


def _graded(job: TrainJob) -> bool:
    """transformers 5.22 takes every_n_layers. With adapters it is not tried: that saves a trace and may miss a plan in between."""
    return _version() >= (5, 22) and job.model.lora is None


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in installed().version.split(".")[:2])


# ---------------------------------------------------------------------------------------------- what follows from the winner


def _notes(subject: Subject, device: Device, allowed: Precisions, pricing: Pricing, winner: Candidate) -> tuple[str, ...]:
    repaired = (f"repaired for transformers {installed().version}: {repair}" for repair in subject.repairs)
    dependent = subject.workload.batch_dependent_loss
    kept = (
        ()
        if dependent is None
        else (f"the loss depends on the batch, so batch and accumulation stay ({dependent}); --allow accumulation frees them",)
    )
    said = (*device.notes, *subject.notes, *repaired, *kept, *allowed.warnings, *subject.workload.notes, *pricing.estimate(winner).notes)
    return tuple(dict.fromkeys(said))


def _failures(verdict: Tried) -> Iterator[str]:
    for trial in verdict.failed:
        c = trial.candidate
        yield f"{c.per_device_batch} × {c.accumulation} {c.precision} was predicted to fit and ran out of memory in the dry run: left out"


def _alternatives(found: Found, pricing: Pricing, winner: Candidate) -> tuple[Priced, ...]:
    """The runners-up with their memory; one whose own trace was not needed is priced by the trace that bounds it."""
    others = [pair for pair in found.ranked if pair[0] != winner][:ALTERNATIVES]
    return tuple(Priced(candidate=c, memory=pricing.nearest_memory(c), time=t) for c, t in others)


def _eval_batch(subject: Subject, pricing: Pricing, winner: Candidate) -> tuple[int, str] | None:
    """Evaluation keeps no activations, so what the training step can hold evaluation can; only where the config evaluates."""
    args = subject.job.args
    if args.get("eval_strategy", "no") in ("no", None, False) and args.get("do_eval") is not True:
        return None
    now = int(args.get("per_device_eval_batch_size") or _defaults()["per_device_eval_batch_size"])
    limit = pricing.known_limit(winner) or winner.per_device_batch
    wanted = min(limit, 2 * winner.per_device_batch)
    wanted = wanted // 8 * 8 if wanted >= 8 else wanted
    if now <= limit and now >= wanted:
        return None
    why = "evaluation keeps no activations: it can hold what training holds" if wanted > now else f"at most {limit} is known to fit"
    return wanted, why


def _learning_rate(subject: Subject, request: Request, effective: int) -> tuple[float, str] | None:
    before = subject.job.effective_batch
    if request.lr_scaling == "none" or effective == before:
        return None
    rate = float(subject.job.args.get("learning_rate") or _defaults()["learning_rate"])
    factor = effective / before if request.lr_scaling == "linear" else (effective / before) ** 0.5
    scaled = float(f"{rate * factor:.6g}")
    return scaled, f"--lr-scaling {request.lr_scaling}: the effective batch goes from {before} to {effective}"
