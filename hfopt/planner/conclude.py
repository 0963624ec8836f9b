"""What follows from the winner: before and after with their loaders, the changes with their reasons, runners-up, notes, advice, charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hfopt.facts.training_keys import installed
from hfopt.planner.advice import advice
from hfopt.planner.batch_rules import batch_rule
from hfopt.planner.changes import Outcome, Setting, changes
from hfopt.planner.charts import charts
from hfopt.planner.choices import defaults
from hfopt.planner.confirm import Confirmed
from hfopt.planner.device import Device
from hfopt.planner.evaluation import eval_batch
from hfopt.planner.feeding import Feeding
from hfopt.planner.generation import check_generation
from hfopt.planner.kernels_on_offer import attention_choices, liger_choices
from hfopt.planner.precision import Precisions
from hfopt.planner.pricing import Pricing
from hfopt.planner.request import Request, Subject
from hfopt.planner.result import Plan
from hfopt.planner.space import Space
from hfopt.schema import Candidate, Change, Chosen, LoaderPlan, MemoryPeak, Neutrality, PlanCharts, PlanFacts, Priced

ALTERNATIVES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How the planning went, up to the winner."""

    subject: Subject
    request: Request
    device: Device
    space: Space
    allowed: Precisions
    pricing: Pricing
    current: Candidate
    before: tuple[MemoryPeak, bool]  # predicted before any correction, and whether it fits
    result: Confirmed
    neutrality: Neutrality | None


def concluded(course: Course) -> Plan:
    subject, device, pricing, result = course.subject, course.device, course.pricing, course.result
    winner, winner_time = result.winner
    feeding = Feeding(subject=subject, host=subject.hardware.host, ranks=subject.job.world_size, on_gpu=device.gpu is not None)
    before, after = _before_and_after(course, feeding)
    facts = PlanFacts(
        job=subject.job,
        hardware=subject.hardware,
        effective_batch=course.space.effective_batch,
        budget_bytes=device.budget_bytes,
        before=before,
        after=after,
        changes=_changes(course, before, after),
        alternatives=_alternatives(course, feeding, after.loader),
        rejected=result.found.rejected,
        trial=result.verdict.trial,
        correction=result.correction,
        neutrality=course.neutrality,
        notes=tuple(dict.fromkeys((*_notes(course), *_failures(course)))),
        weights_dtype=device.stored_in(subject.workload),
    )
    return Plan(
        facts=replace(facts, advice=advice(facts, pricing, winner_time)),
        loaded=subject.loaded,
        charts=charts(pricing, course.space, winner, device.gpu) if course.request.charts else PlanCharts(),
        trial_runs=result.verdict.runs,
    )


def _before_and_after(course: Course, feeding: Feeding) -> tuple[Chosen, Chosen]:
    """Both as predicted; the loader is sized for the step as it was measured, where it was."""
    pricing, current = course.pricing, course.current
    winner, winner_time = course.result.winner
    measured_s = course.result.correction.measured_step_s if course.result.correction is not None else None
    demand = winner_time if measured_s is None else replace(winner_time, step_s=measured_s)
    before = feeding.chosen(current, pricing.time(current), course.before[0], fits=course.before[1], loader=feeding.current())
    after = feeding.chosen(winner, winner_time, pricing.memory(winner), fits=True, loader=feeding.planned(winner, demand))
    return before, after


def _changes(course: Course, before: Chosen, after: Chosen) -> tuple[Change, ...]:
    job = course.subject.job
    outcome = Outcome(
        before=before,
        after=after,
        effective_batch=course.space.effective_batch,
        budget_bytes=course.device.budget_bytes,
        device=course.device.name,
        eval_batch=eval_batch(course.subject, course.pricing, course.result.winner[0]),
        learning_rate=_learning_rate(course),
    )
    return changes(Setting(args={**_attention(course), **job.args}, defaults=defaults(), kept=job.kept), outcome)


def _attention(course: Course) -> dict[str, str]:
    """Not one of the Trainer's arguments, but it may be a key of the file."""
    stated = course.subject.job.model.attn_implementation
    return {} if stated is None else {"attn_implementation": stated}


def _notes(course: Course) -> Iterator[str]:
    subject, request = course.subject, course.request
    yield from course.device.notes
    yield from subject.notes
    yield from (f"repaired for transformers {installed().version}: {repair}" for repair in subject.repairs)
    if (dependent := subject.workload.batch_dependent_loss) is not None:
        yield f"the loss depends on the batch, so batch and accumulation stay ({dependent}); --allow accumulation frees them"
    yield from batch_rule(subject.job).notes
    yield from _shapes(course)
    yield from course.allowed.warnings
    yield from subject.workload.notes
    yield from _generation(course)
    yield from course.pricing.estimate(course.result.winner[0]).notes
    for offer in (attention_choices(subject, request.allow, course.device.gpu), liger_choices(subject, request.allow)):
        if offer.note is not None:
            yield offer.note


def _shapes(course: Course) -> Iterator[str]:
    compiled = course.result.winner[0].torch_compile or course.subject.job.args.get("torch_compile") is True
    if compiled and course.subject.workload.lengths is not None:
        yield "torch_compile compiles anew for every length: pad all samples to one (or to a multiple of 64), and drop the last batch"


def _generation(course: Course) -> Iterator[str]:
    device, workload = course.device, course.subject.workload
    winner, dtype = course.result.winner[0], device.stored_in(workload)
    peak = course.pricing.memory(winner)
    yield from check_generation(course.subject, peak, budget_bytes=device.budget_bytes, precision=winner.precision, dtype=dtype)


def _failures(course: Course) -> Iterator[str]:
    for trial in course.result.verdict.failed:
        c = trial.candidate
        words = f"{c.per_device_batch} × {c.accumulation} {c.precision_words(course.device.stored_in(course.subject.workload))}"
        yield f"{words} was predicted to fit and ran out of memory in the dry run: left out"


def _alternatives(course: Course, feeding: Feeding, loader: LoaderPlan) -> tuple[Priced, ...]:
    """The runners-up that fit at their own batch, fed by the winner's loader so that their rates compare with its own."""
    winner = course.result.winner[0]
    others = [pair for pair in course.result.found.ranked if pair[0] != winner][:ALTERNATIVES]
    memories = course.pricing.nearest_memories([candidate for candidate, _ in others])
    return tuple(
        Priced(candidate=candidate, memory=memory, time=feeding.fed(candidate, time, loader))
        for (candidate, time), memory in zip(others, memories, strict=True)
        if memory.device_bytes <= course.device.budget_bytes
    )


def _learning_rate(course: Course) -> tuple[float, str] | None:
    job, scaling, effective = course.subject.job, course.request.lr_scaling, course.space.effective_batch
    before = job.effective_batch
    if scaling == "none" or effective == before:
        return None
    rate = float(job.args.get("learning_rate") or defaults()["learning_rate"])
    factor = effective / before if scaling == "linear" else (effective / before) ** 0.5
    scaled = float(f"{rate * factor:.6g}")
    return scaled, f"--lr-scaling {scaling}: the effective batch goes from {before} to {effective}"
