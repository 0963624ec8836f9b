"""After an out-of-memory error: the next step down, always at the same effective batch, and how long it lasts.

The order goes from cheap to dear: the same size once more when memory was only fragmented; the largest divisor of the batch that should
fit; gradient checkpointing; a restart with settings a running process cannot take; and last the smallest change that would fit, in words.

What fits is read off a memory curve through what was seen. The memory model (when there is one) gives the shape, the OOM gives one point
on or below the true curve: `allocated + requested` was needed and was not there. Without a model the curve is the straight line from the
bytes that stay (weights, optimizer state) to that point; with nothing known, half the size is the guess. Pure: values in, a decision with
its reason out.

How long a smaller size lasts: one window for a rare long batch, until further notice when it keeps happening, and back up when it is
quiet.

Pure. `after_window` learns of each accumulation window whether memory ran out in it and at which size it went through. A size is made
lasting once `settle_after` of the last `RECENT` windows ran out of memory. After `grow_after` quiet windows the next larger size is
tried; if memory runs out again within `settle_after` windows of that, it was too early, and the next wait is twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hfopt.schema import Candidate, Checkpointing, MemoryModel, OomSeen, ReplanStep
from hfopt.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a batch cannot be cut into pieces without changing the training."""

    name: str  # a stable word: batch_norm, contrastive, packed, ragged, ...
    reason: str
    batch_bound: bool = False  # the training depends on the per-device batch itself, so a restart must keep it too
    lasting: bool = False  # the failed attempt has left what nothing puts back: the step is not repeated in this process at all


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """All that the decision rests on. `failed.per_device_batch` is the size of the pieces that ran when memory ran out."""

    failed: Candidate
    seen: OomSeen
    memory: MemoryModel | None = None
    cleared: bool = False  # this size has already been tried again after clearing the cache
    can_checkpoint: bool = False  # the model supports it
    refusal: Refusal | None = None
    process_lost: str | None = None  # why this process cannot repeat the step: the optimizer had begun, the ranks are out of step, ...


def next_step(situation: Situation) -> ReplanStep:
    """The cheapest thing left that keeps the effective batch and should fit."""
    failed, seen = situation.failed, situation.seen
    if situation.process_lost is not None:
        return _restart(situation, situation.process_lost)
    if fragmented(seen) and not situation.cleared:
        return ReplanStep(action="retry_after_clearing", candidate=failed, reason=f"{_unused(seen)} but scattered: clear and try again")
    if situation.refusal is None and failed.per_device_batch > 1:
        size, reason = next_size(failed, seen, situation.memory)
        return ReplanStep(action="chunk", candidate=resized(failed, size), reason=reason)
    if situation.can_checkpoint and not failed.checkpointing.on:
        why = "one sample alone does not fit" if situation.refusal is None else f"cannot be cut into pieces ({situation.refusal.reason})"
        return ReplanStep(action="checkpointing", candidate=_with_checkpointing(failed), reason=f"{why}; recompute activations instead")
    if situation.refusal is not None and not situation.refusal.batch_bound:
        return _restart(situation, situation.refusal.reason)
    return _give_up(situation)


def fragmented(seen: OomSeen) -> bool:
    """There was enough memory for the request, only not in one piece. (PyTorch has already given back whole unused blocks by then.)"""
    needed = _needed_bytes(seen)
    return needed is not None and seen.capacity_bytes is not None and needed <= seen.capacity_bytes


def _unused(seen: OomSeen) -> str:
    if seen.reserved_bytes is None or seen.allocated_bytes is None:
        return "enough memory was there"
    return f"{format_bytes(seen.reserved_bytes - seen.allocated_bytes)} were reserved"


def next_size(failed: Candidate, seen: OomSeen, memory: MemoryModel | None = None) -> tuple[int, str]:
    """The largest divisor of the failed size that the corrected curve says will fit, and why."""
    size = failed.per_device_batch
    assert size > 1
    smaller = [divisor for divisor in range(1, size) if size % divisor == 0]
    if seen.capacity_bytes is None or _needed_bytes(seen) is None:
        return max(smaller), f"{size} did not fit; half is the first guess, for the device does not say what was missing"
    fits = [divisor for divisor in smaller if _corrected_bytes(failed, divisor, seen, memory) <= seen.capacity_bytes]
    if not fits:
        return 1, f"{size} did not fit in {format_bytes(seen.capacity_bytes)} and the curve leaves room for one sample at most"
    best = max(fits)
    needed = format_bytes(_corrected_bytes(failed, best, seen, memory))
    source = " by the plan's memory curve" if _curve(failed, best, memory) is not None else ""
    return best, f"{size} did not fit in {format_bytes(seen.capacity_bytes)}; {best} should need {needed}{source}"


def resized(candidate: Candidate, size: int) -> Candidate:
    """The same effective batch from smaller micro-batches."""
    product = candidate.per_device_batch * candidate.accumulation
    assert product % size == 0, "only divisors keep the effective batch"
    return replace(candidate, per_device_batch=size, accumulation=product // size)


def _needed_bytes(seen: OomSeen) -> int | None:
    if seen.allocated_bytes is None or seen.requested_bytes is None:
        return None
    return seen.allocated_bytes + seen.requested_bytes


def _corrected_bytes(failed: Candidate, size: int, seen: OomSeen, memory: MemoryModel | None) -> int:
    """What `size` samples need: the curve's shape through the point that was seen. That point exceeds the capacity by definition."""
    seen_bytes = _needed_bytes(seen)
    assert seen_bytes is not None and seen.capacity_bytes is not None
    needed = max(seen_bytes, seen.capacity_bytes + 1)
    curve = _curve(failed, size, memory)
    if curve is None:
        fixed = min(seen.baseline_bytes or 0, needed)
        return round(fixed + (needed - fixed) * size / failed.per_device_batch)
    at_one, at_size, at_failed = curve
    slope = (at_failed - at_one) / (failed.per_device_batch - 1)
    fixed = round(at_one - slope)
    stretch = max(1.0, (needed - fixed) / max(at_failed - fixed, 1))
    return round(fixed + (at_size - fixed) * stretch)


def _curve(failed: Candidate, size: int, memory: MemoryModel | None) -> tuple[int, ...] | None:
    """The model's bytes for one sample, for `size` and for the size that failed; None where it does not know one of them.

    Reserved bytes: the capacity that was seen is the allocator's own, without the context.
    """
    peaks = [memory(resized(failed, batch)) for batch in (1, size, failed.per_device_batch)] if memory is not None else [None]
    found = tuple(peak.reserved_bytes for peak in peaks if peak is not None)
    return found if len(found) == len(peaks) else None


def _with_checkpointing(candidate: Candidate) -> Candidate:
    return replace(candidate, checkpointing=Checkpointing(every_n_layers=1))


def _restart(situation: Situation, why: str) -> ReplanStep:
    """Settings for a new process: smaller pieces where that keeps the training, else checkpointing."""
    failed, bound = situation.failed, situation.refusal is not None and situation.refusal.batch_bound
    if failed.per_device_batch > 1 and not bound:
        size, reason = next_size(failed, situation.seen, situation.memory)
        return ReplanStep(action="restart", candidate=resized(failed, size), reason=f"{why}; {reason}")
    if situation.can_checkpoint and not failed.checkpointing.on:
        return ReplanStep(action="restart", candidate=_with_checkpointing(failed), reason=f"{why}; with gradient checkpointing")
    return _give_up(situation)


def _give_up(situation: Situation) -> ReplanStep:
    failed, seen = situation.failed, situation.seen
    tried = f"{failed.per_device_batch} sample{'s' if failed.per_device_batch > 1 else ''} at a time"
    if failed.checkpointing.on:
        tried += " with gradient checkpointing"
    why = f"; smaller pieces would change the training ({situation.refusal.reason})" if situation.refusal is not None else ""
    return ReplanStep(
        action="give_up",
        candidate=None,
        reason=f"{tried} does not fit and nothing is left to try{why}",
        smallest_change=_smallest_change(seen),
    )


def _smallest_change(seen: OomSeen) -> str:
    needed = _needed_bytes(seen)
    if needed is None or seen.capacity_bytes is None:
        shorter = f"shorter samples (this one has {seen.length} tokens), " if seen.length else "smaller samples, "
        return f"{shorter}adapters (LoRA) in place of full training, or a device with more memory"
    needed = max(needed, seen.capacity_bytes + 1)
    missing = f"at least {format_bytes(needed - seen.capacity_bytes)} more memory"
    fixed = seen.baseline_bytes or 0
    if seen.length and fixed < seen.capacity_bytes:
        length = int(seen.length * (seen.capacity_bytes - fixed) / (needed - fixed))
        return f"samples of at most about {length} tokens (this one has {seen.length}), or {missing}"
    if fixed >= seen.capacity_bytes:
        return f"adapters (LoRA) or a smaller optimizer state: what stays on the device leaves no room for a sample; or {missing}"
    return missing


RECENT = 20  # windows; with settle_after = 3, more than one window in seven running out is no longer rare
LONGEST_WAIT = 10_000  # windows; growing back is tried now and then even in a long run


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    full: int  # samples in a whole micro-batch
    settle_after: int = 3
    grow_after: int = 100
    size: int | None = None  # the lasting size; None is the whole micro-batch
    failed_sizes: tuple[int | None, ...] = ()  # of the last windows: the size a failed one went through at, None for a quiet one
    quiet: int = 0
    wait: int = 0  # quiet windows before the next try; 0 until a size was made lasting
    grown_from: int | None = None  # the size to return to when the last growth was too early

    @property
    def all_went_through(self) -> bool:
        """Whole micro-batches and no failure to remember: a quiet window changes nothing."""
        return self.size is None and not self.failed_sizes and self.grown_from is None


def after_window(pace: Pace, passed_at: int | None) -> Pace:
    """`passed_at` is the size a window went through at after running out of memory, None when it did not run out."""
    if passed_at is None and pace.all_went_through:
        return pace
    recent = (*pace.failed_sizes, passed_at)[-RECENT:]
    if not any(recent):
        recent = ()
    if passed_at is None:
        return _quiet(replace(pace, failed_sizes=recent))
    if pace.grown_from is not None:
        return replace(
            pace, size=min(pace.grown_from, passed_at), grown_from=None, quiet=0, wait=min(2 * pace.wait, LONGEST_WAIT), failed_sizes=()
        )
    failures = [size for size in recent if size is not None]
    if len(failures) < pace.settle_after:
        return replace(pace, failed_sizes=recent, quiet=0)
    return replace(pace, size=min(failures), failed_sizes=(), quiet=0, wait=pace.wait or pace.grow_after)


def _quiet(pace: Pace) -> Pace:
    quiet = pace.quiet + 1
    confirmed = pace.grown_from is not None and quiet >= pace.settle_after
    if pace.size is None or quiet < pace.wait:
        return replace(pace, quiet=quiet, grown_from=None if confirmed else pace.grown_from)
    larger = next((size for size in range(pace.size + 1, pace.full) if pace.full % size == 0), None)
    return replace(pace, size=larger, grown_from=pace.size, quiet=0)
