"""What only the user may do: a larger effective batch, an environment variable. Each with what it would bring, computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hfopt.planner.pricing import Pricing
from hfopt.schema import Advice, PlanFacts, StepTime
from hfopt.units import format_bytes, format_percent, format_rate

IDLE = 0.85  # below this utilization the effective batch is looked at
WORTH = 1.05  # a gain below this is not worth a word
EXPANDABLE_SHARE = 0.03  # of the budget that expandable segments must give back


def advice(facts: PlanFacts, pricing: Pricing, alone: StepTime) -> tuple[Advice, ...]:
    """`alone` is the winner's step without the loader."""
    return (*_larger_batch(facts, pricing, alone), *_expandable_segments(facts, pricing), *_neutrality(facts))


def _larger_batch(facts: PlanFacts, pricing: Pricing, alone: StepTime) -> Iterator[Advice]:
    """When one whole effective batch leaves the card idle, its multiples are priced: only the user may change the training."""
    winner = facts.after.candidate
    if winner.accumulation != 1 or alone.gpu_utilization >= IDLE:
        return
    limit = pricing.known_limit(winner) or 0
    gains = []
    for factor in (2, 4, 8):
        batch = winner.per_device_batch * factor
        if batch > limit:
            break
        larger = pricing.time(replace(winner, per_device_batch=batch))
        if larger.samples_per_s >= WORTH * alone.samples_per_s:
            gain = larger.samples_per_s / alone.samples_per_s
            gains.append(f"{factor}x ({facts.effective_batch * factor}): {gain:.1f} times the samples/s")
    if gains:
        busy, rate = format_percent(alone.gpu_utilization), format_rate(alone.samples_per_s, "samples")
        yield Advice(
            title=f"an effective batch of {facts.effective_batch} keeps the card busy only {busy} of the time",
            detail=f"{'; '.join(gains)} (now {rate}). It changes the training, so the learning rate may need scaling",
            flag=f"--effective-batch {facts.effective_batch * 2} --lr-scaling sqrt",
        )


def _expandable_segments(facts: PlanFacts, pricing: Pricing) -> Iterator[Advice]:
    if facts.hardware.smallest is None:
        return
    winner = facts.after.candidate
    plain, expandable = facts.after.memory, pricing.memory(winner, expandable_segments=True)
    saved = plain.reserved_bytes - expandable.reserved_bytes
    if saved >= EXPANDABLE_SHARE * facts.budget_bytes:
        yield Advice(
            title="expandable segments would give memory back",
            detail=f"{format_bytes(saved)} of the {format_bytes(plain.reserved_bytes)} reserved are fragments by prediction",
            flag="export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )


def _neutrality(facts: PlanFacts) -> Iterator[Advice]:
    found = facts.neutrality
    if found is None or found.neutral:
        return
    traded = facts.after.candidate.accumulation != facts.job.accumulation
    so = "The config's own does not fit, so it was traded all the same" if traded else "So the accumulation stays as it is"
    grows = f"the gradient of n micro-batches is {found.ratio:.2f} times that of one batch: " if found.ratio != 1 else ""
    repaired = "; where it is traded, `hfopt run` divides by it, as the Trainer does for other models" if found.fixable else ""
    yield Advice(
        title=f"{found.model_class} is not neutral to accumulation in transformers {found.transformers_version}",
        detail=f"{grows}{found.reason}. {so}{repaired}",
        flag="--allow accumulation",
    )
