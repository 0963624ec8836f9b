"""Memory of a training step for any batch size, from one pair of traces.

`MemoryCurve` holds the affine timeline. `peak(batch)` replays it through the simulated allocator, exactly. `peaks(batches)` prices
thousands of batch sizes at once: allocated memory is the upper envelope of affine functions (one per event, few of them on the hull),
reserved memory is allocated × the ratio replayed at a few anchors, interpolated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.estimate.allocator import CachingAllocator, OutOfMemory
from hfopt.estimate.allocator_options import AllocatorOptions
from hfopt.estimate.coarse import COARSE_BATCH, COARSE_NOTE, coarse_timeline
from hfopt.estimate.context import context_bytes
from hfopt.estimate.envelope import running_lines, upper_envelope
from hfopt.estimate.lengths import VaryingLengths, shortened, shorter_length, varying
from hfopt.estimate.repetition import ThirdStep
from hfopt.estimate.timeline import FREED, Timeline, alone, combine
from hfopt.schema import Breakdown, LengthSpread, MemoryPeak, OpCost, StepSettings, Workload

if TYPE_CHECKING:
    import numpy as np

    from hfopt.estimate.session import Script, Tracer
    from hfopt.estimate.trace import Trace

TRACED_BATCHES = (2, 3)  # not 1: a dimension of size one is laid out in its own way
_ANCHORS = 7
_LARGEST_BATCH = 1 << 20


@dataclass(frozen=True, slots=True)
class Replay:
    allocated_bytes: int
    reserved_bytes: int
    peak_event: int
    fits: bool = True


@dataclass(slots=True)
class MemoryCurve:
    """Peak memory as a function of the batch size."""

    timeline: Timeline
    context_bytes: int
    varying: VaryingLengths | None = None  # lengths that vary: reserved memory is the larger of one length and many
    goes_on: bool = False  # the timeline is a Trainer's two steps, which a third one follows
    _replays: dict[tuple[Any, ...], Replay] = field(default_factory=dict)
    _envelope: tuple[Any, Any] | None = None
    _third: ThirdStep | None = None

    # ------------------------------------------------------------------------------------------ one batch size

    def peak(self, batch: int, expandable_segments: bool = False, *, options: AllocatorOptions | None = None) -> MemoryPeak:
        replay = self.replay(batch, options or AllocatorOptions(expandable_segments=expandable_segments))
        return MemoryPeak(
            batch=batch,
            allocated_bytes=replay.allocated_bytes,
            reserved_bytes=replay.reserved_bytes,
            context_bytes=self.context_bytes,
            breakdown=self._breakdown(batch, replay),
            moment=self._moment(replay.peak_event),
        )

    def replay(self, batch: int, options: AllocatorOptions | None = None, *, capacity_bytes: int | None = None) -> Replay:
        """The exact replay; with a capacity, cached segments are given back when it is reached, as the real allocator does."""
        if batch < 1:
            raise TraceError(f"a batch size of {batch} cannot be estimated", hint="the smallest batch size is 1")
        key = (batch, options, capacity_bytes)
        if key not in self._replays:
            self._replays[key] = self._replay(batch, lambda: CachingAllocator(options, capacity_bytes=capacity_bytes))
        return self._replays[key]

    def _replay(self, batch: int, allocator: Callable[[], CachingAllocator]) -> Replay:
        timeline = self.timeline
        same = self._replay_one_length(batch, allocator())
        if self.varying is None or not same.fits:
            return same
        mixed = replay_events(timeline, self.varying.events(batch), allocator())
        return replace(same, reserved_bytes=max(same.reserved_bytes, mixed.reserved_bytes), fits=mixed.fits)

    def _replay_one_length(self, batch: int, allocator: CachingAllocator) -> Replay:
        """The two traced steps, a third that repeats the second, then what follows in the timeline."""
        timeline, sizes = self.timeline, self.timeline.sizes(batch)
        events = list(zip(timeline.blocks.tolist(), sizes, strict=True))
        if not self.goes_on:
            return replay_events(timeline, events, allocator)
        end = timeline.marks["end"]
        traced_steps = replay_events(timeline, events[:end], allocator)
        if not traced_steps.fits:
            return traced_steps
        self._third = self._third or ThirdStep(timeline)
        third = replay_events(timeline, self._third.events(sizes), allocator)
        rest = replay_events(timeline, events[end:], allocator) if third.fits else third
        peaks_later = third.fits and rest.allocated_bytes > third.allocated_bytes
        return replace(rest, peak_event=end + rest.peak_event if peaks_later else traced_steps.peak_event)

    def fits(self, batch: int, budget_bytes: int, options: AllocatorOptions | None = None) -> bool:
        """Does it run in `budget_bytes` of device memory, the context included?"""
        room = budget_bytes - self.context_bytes
        return room > 0 and self.replay(batch, options, capacity_bytes=room).fits

    def largest_batch(self, budget_bytes: int, options: AllocatorOptions | None = None) -> int | None:
        """The largest batch size that fits, by exact replays; None when not even 1 does.

        What is allocated alone, without a replay, says about where that is; from there it is looked for in doubling steps, then bisected.
        """
        if not self.fits(1, budget_bytes, options):
            return None
        low, high = 1, _LARGEST_BATCH + 1
        probe = self._roughly_largest(budget_bytes)
        stride = max(1, probe // 64)
        while high - low > 1:
            probe = min(max(probe, low + 1), high - 1)
            if self.fits(probe, budget_bytes, options):
                low, probe = probe, probe + stride if high > _LARGEST_BATCH else (probe + high) // 2
            else:
                high, probe = probe, probe - stride if low == 1 else (low + probe) // 2
            stride *= 2
        return low

    def _roughly_largest(self, budget_bytes: int) -> int:
        """The largest batch whose allocations alone stay within the budget, rounding left out."""
        import numpy as np

        room = budget_bytes - self.context_bytes
        low, high = 1, _LARGEST_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            if self._enveloped(np.array([middle], dtype=np.int64))[0] <= room:
                low = middle
            else:
                high = middle - 1
        return low

    # ------------------------------------------------------------------------------------------ many batch sizes

    def peaks(self, batches: Sequence[int], expandable_segments: bool = False) -> tuple[MemoryPeak, ...]:
        """Vectorised: allocated from the envelope, reserved interpolated between replayed anchors. No breakdown."""
        import numpy as np

        if not len(batches):
            return ()
        sizes = np.asarray(batches, dtype=np.int64)
        allocated = self._enveloped(sizes)
        options = AllocatorOptions(expandable_segments=expandable_segments)
        anchors = sorted({round(b) for b in np.geomspace(max(1, sizes.min()), sizes.max(), _ANCHORS).tolist()})
        replays = [self.replay(anchor, options) for anchor in anchors]
        base = self._enveloped(np.array(anchors, dtype=np.int64))
        log = np.log(sizes)
        up = np.interp(log, np.log(anchors), [replay.allocated_bytes / b for replay, b in zip(replays, base, strict=True)])
        over = np.interp(log, np.log(anchors), [replay.reserved_bytes / b for replay, b in zip(replays, base, strict=True)])
        return tuple(
            MemoryPeak(batch=int(b), allocated_bytes=int(a * u), reserved_bytes=int(a * o), context_bytes=self.context_bytes)
            for b, a, u, o in zip(sizes.tolist(), allocated.tolist(), up.tolist(), over.tolist(), strict=True)
        )

    def _enveloped(self, batches: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import numpy as np

        if self._envelope is None:
            self._envelope = upper_envelope(*running_lines(self.timeline))
        constants, slopes = self._envelope
        peak: np.ndarray[Any, Any] = np.max(constants[:, None] + slopes[:, None] * batches[None, :], axis=0)
        return peak

    # ------------------------------------------------------------------------------------------ explanations

    def _moment(self, event: int) -> str:
        place = self.timeline.places[int(self.timeline.place_of[event])]
        parts = [place.phase, place.module or "the whole model", place.op]
        return ", ".join(part for part in parts if part)

    def _breakdown(self, batch: int, replay: Replay) -> Breakdown:
        """Requested bytes of what is live at the peak, by kind; rounding and unused cache are the fragmentation, so that all adds up."""
        from hfopt.estimate.breakdown import live_bytes

        live = live_bytes(self.timeline, batch, replay.peak_event)
        return Breakdown(
            weights_bytes=live["weights"],
            gradients_bytes=live["gradients"],
            optimizer_bytes=live["optimizer"],
            activations_bytes=live["activations"],
            logits_bytes=live["logits"],
            temporaries_bytes=live["temporaries"],
            fragmentation_bytes=replay.reserved_bytes - sum(live.values()),
            context_bytes=self.context_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one trace pair says: memory for every batch size, the kernels of a step, how long it took and what to know about it."""

    curve: MemoryCurve
    ops: tuple[OpCost, ...]
    seconds: float
    notes: tuple[str, ...] = ()


def estimate(workload: Workload, settings: StepSettings) -> Estimate:
    """The curve over all batch sizes; a sharded step of many equal blocks is traced with fewer of them."""
    from hfopt.estimate.depth import DepthCurve, deeper_ops, share_of, traced_depths

    depths = traced_depths(workload) if settings.sharding is not None and settings.sharding.engine != "ddp" else None
    if depths is None:
        return traced(workload, settings)
    assert workload.layers is not None, "a model without layers has no depths"
    (shallow, deep), share = (traced(one, settings) for one in depths), share_of(workload.layers)
    curve = DepthCurve(deep.curve.timeline, deep.curve.context_bytes, shallow=shallow.curve, deep=deep.curve, share=share)
    ops = deeper_ops(shallow.ops, deep.ops, share)
    return Estimate(curve=curve, ops=ops, seconds=shallow.seconds + deep.seconds, notes=deep.notes)


def traced(workload: Workload, settings: StepSettings) -> Estimate:
    """Traces the Trainer's step at two batch sizes."""
    from hfopt.estimate.op_groups import grouped, proportional
    from hfopt.estimate.ranks.tracing import tracer_of
    from hfopt.estimate.trainer_step import trainer_script

    began = time.perf_counter()
    notes = list(workload.notes)
    if settings.torch_compile:
        notes.append("torch.compile is not traced: the figures are those of the eager step")
    script = trainer_script(settings, workload.compute_loss)
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    with tracer_of(workload, settings) as tracer:
        first, second = (tracer.record(script, batch) for batch in TRACED_BATCHES)
        try:
            timeline = combine(first, second)
            spread = _varying(tracer, script, first, timeline, workload.lengths, notes)
            curve = MemoryCurve(timeline, context, spread, goes_on=settings.sharding is None)
            ops = grouped(first, second)
        except TraceError as error:
            second = tracer.record(script, COARSE_BATCH)
            curve = MemoryCurve(coarse_timeline(*(MemoryCurve(alone(one), 0).peak(one.batch) for one in (first, second))), context)
            ops = proportional(first)
            notes.append(COARSE_NOTE.format(first.batch, second.batch, error))
    return Estimate(curve=curve, ops=ops, seconds=time.perf_counter() - began, notes=tuple(notes))


def _varying(
    tracer: Tracer, script: Script, full: Trace, timeline: Timeline, spread: LengthSpread | None, notes: list[str]
) -> VaryingLengths | None:
    """A third trace at a shorter length, where the samples' lengths are known to vary; a note says what came of it."""
    shorter = None if spread is None else shorter_length(spread.longest)
    if spread is None or shorter is None:
        return None
    try:
        short = tracer.record(script, full.batch, change=lambda batch: shortened(batch, spread.longest, shorter))
        found = varying(timeline, full, short, spread, shorter)
    except TraceError as error:
        notes.append(f"each batch has its own length, but only the longest could be replayed ({error}): more may be reserved")
        return None
    notes.append(
        f"each batch is padded to its own longest sample: {found.steps} steps of drawn lengths up to {spread.longest} are replayed"
    )
    return found


def replay_events(timeline: Timeline, events: Iterable[tuple[int, int]], allocator: CachingAllocator) -> Replay:
    """Pairs of block and size (or FREED) through an allocator; a repetition of the timeline's block stays on its stream."""
    allocate, free = allocator.allocate, allocator.free
    streams, stride = timeline.streams, timeline.next_block
    peak = peak_event = 0
    for event, (block, size) in enumerate(events):
        if size == FREED:
            free(block)
        elif size > 0:
            try:
                allocate(block, size, streams.get(block % stride, 0) if streams else 0)
            except OutOfMemory:
                return Replay(allocator.peak_allocated, allocator.peak_reserved, event, fits=False)
            if allocator.allocated > peak:
                peak, peak_event = allocator.allocated, event
    return Replay(allocator.peak_allocated, allocator.peak_reserved, peak_event)
