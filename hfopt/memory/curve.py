"""Peak memory as a function of the batch size, from one affine timeline.

`peak(batch)` replays the timeline through the simulated allocator, exactly. `peaks(batches)` prices thousands of batch sizes at once:
allocated memory is the upper envelope of affine functions (one per event, few of them on the hull), reserved memory is allocated × the
ratio replayed at a few anchors, interpolated.

A batch fits when all that the allocator reserves for it, what it merely keeps cached included, stays within the budget. On a full card the
allocator gives cached segments back, and a run may survive on that: it is reported (`giving_back`), not planned with. What is reserved
does not always grow with the batch (other sizes reuse other blocks), so a batch below `largest_batch` need not fit: `fits` says it.

A replay is a pure function of the events, so its answer is found by a digest of them, whichever card, batch or trace they came from: cards
whose kernels take the same sizes share it, and so does the next question about the same job, from the disk (`store`). A digest takes a
millisecond, a replay twenty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.memory.allocator import AllocatorOptions, CachingAllocator, OutOfMemory
from hfopt.memory.real_steps import VaryingLengths, emptier_first_steps, fuller_and_fuller
from hfopt.memory.timeline import FREED, ThirdStep, Timeline
from hfopt.schema import Breakdown, MemoryPeak
from hfopt.store import default_store

if TYPE_CHECKING:
    import numpy as np


MOST_KEPT = 4096  # replays of one model, the newest: some hundred bytes each


@dataclass(frozen=True, slots=True)
class Replay:
    """What events took of the allocator; `peak_event` is where most was allocated."""

    allocated_bytes: int
    reserved_bytes: int
    peak_event: int
    fits: bool = True


_known: ContextVar[tuple[str, dict[str, Replay]] | None] = ContextVar("known", default=None)  # a workload, and its replays by digest


@contextmanager
def replays_kept(workload: str | None, label: str) -> Iterator[None]:
    """In here a replay that is known is not made again, and what is new is kept, however it ends. None: a model that may not be kept."""
    outer = _known.get()
    if workload is None or (outer is not None and outer[0] == workload):
        yield
        return
    store, parts = default_store(), {"what": "replays", "workload": workload}
    replays = _sound_replays(None if store is None else store.get(parts))
    before = len(replays)
    token = _known.set((workload, replays))
    try:
        yield
    finally:
        _known.reset(token)
        if store is not None and len(replays) > before:
            rows = [[digest, *astuple(one)] for digest, one in list(replays.items())[-MOST_KEPT:]]
            store.put(parts, rows, label=label)


def _sound_replays(rows: Any) -> dict[str, Replay]:
    """What is not as it was written is left out: it costs a replay."""
    kinds = [str, int, int, int, bool]
    return {
        row[0]: Replay(*row[1:])
        for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, list) and [type(item) for item in row] == kinds
    }


def known_or_made(described: Callable[[], Iterator[bytes]], replay: Callable[[], Replay]) -> Replay:
    """`described` is all that the replay depends on; it is asked only where replays are kept."""
    known = _known.get()
    if known is None:
        return replay()
    digest = hashlib.sha256()
    for part in described():
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    name = digest.hexdigest()
    if name not in known[1]:
        known[1][name] = replay()
    return known[1][name]


def running_lines(timeline: Timeline) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Live bytes after each event as lines over the batch, rounding left out (the anchors put it back)."""
    import numpy as np

    constants, slopes = timeline.constants.copy(), timeline.slopes.copy()
    for index, formula in timeline.formulas.items():
        low, high = formula.bytes(8), formula.bytes(64)
        slopes[index] = (high - low) / 56
        constants[index] = low - slopes[index] * 8
    taken: dict[int, int] = {}
    for event, (block, freed) in enumerate(zip(timeline.blocks.tolist(), timeline.is_free.tolist(), strict=True)):
        if freed:
            birth = taken[block]
            constants[event], slopes[event] = -constants[birth], -slopes[birth]
        else:
            taken[block] = event
    return np.cumsum(constants), np.cumsum(slopes)


def upper_envelope(constants: np.ndarray[Any, Any], slopes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The lines that are highest somewhere for batch > 0: the upper hull, by increasing slope."""
    import numpy as np

    order = np.lexsort((constants, slopes))
    heights, rises = constants.tolist(), slopes.tolist()  # numbers of numpy's one by one take several times as long
    hull: list[int] = []
    for index in order.tolist():
        while hull and (rises[hull[-1]] == rises[index] or heights[hull[-1]] <= heights[index]):
            hull.pop()  # same slope and lower, or lower everywhere that counts
        while len(hull) > 1 and _crosses_before(heights, rises, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    return constants[hull], slopes[hull]


def _crosses_before(constants: Any, slopes: Any, a: int, b: int, c: int) -> bool:
    """Does line c pass a before b does? Then b is never highest."""
    return bool((constants[a] - constants[c]) * (slopes[b] - slopes[a]) <= (constants[a] - constants[b]) * (slopes[c] - slopes[a]))


_ANCHORS = 7
_LARGEST_BATCH = 1 << 20
_FEW, _MANY = 3, 16


@dataclass(slots=True)
class MemoryCurve:
    """Peak memory as a function of the batch size."""

    timeline: Timeline
    context_bytes: int
    varying: VaryingLengths | None = None  # lengths that vary: reserved memory is the larger of one length and many
    third_step_follows: bool = False  # the timeline is a Trainer's two steps, which a third one follows
    options: AllocatorOptions = field(default_factory=AllocatorOptions)
    uneven: bool = False  # samples of several lengths in a batch: the rows that a fused head sees vary, those of padding are left out
    _replays: dict[tuple[Any, ...], Replay] = field(default_factory=dict)
    _peaks: dict[tuple[Any, ...], MemoryPeak] = field(default_factory=dict)
    _envelope: tuple[Any, Any] | None = None
    _third: tuple[Timeline, ThirdStep] | None = None

    def of_window(self, batches: int) -> MemoryCurve | None:
        """The curve of steps with so many micro-batches; None where the timeline does not show a step's window."""
        timeline = self.timeline.of_window(batches, third=self.third_step_follows)
        if timeline is None or timeline is self.timeline:
            return None if timeline is None else self
        spread = None if self.varying is None else self.varying.of_window(batches)
        return replace(self, timeline=timeline, varying=spread, _replays={}, _peaks={}, _envelope=None, _third=None)

    # ------------------------------------------------------------------------------------------ one batch size

    def peak(self, batch: int, options: AllocatorOptions | None = None) -> MemoryPeak:
        if (batch, options) not in self._peaks:
            replay = self.replay(batch, options)
            self._peaks[batch, options] = MemoryPeak(
                batch=batch,
                allocated_bytes=replay.allocated_bytes,
                reserved_bytes=replay.reserved_bytes,
                context_bytes=self.context_bytes,
                breakdown=self._breakdown(batch, replay),
                moment=self._moment(batch, replay.peak_event),
            )
        return self._peaks[batch, options]

    def replay(self, batch: int, options: AllocatorOptions | None = None, *, capacity_bytes: int | None = None) -> Replay:
        """The exact replay; with a capacity, cached segments are given back when it is reached, as the real allocator does."""
        options = options or self.options
        if batch < 1:
            raise TraceError(f"a batch size of {batch} cannot be estimated", hint="the smallest batch size is 1")
        key = (batch, options, capacity_bytes)
        if key not in self._replays:
            self._replays[key] = known_or_made(
                lambda: self._described(batch, options, capacity_bytes),
                lambda: self._replay(batch, options, capacity_bytes),
            )
        return self._replays[key]

    def _described(self, batch: int, options: AllocatorOptions, capacity_bytes: int | None) -> Iterator[bytes]:
        """All that a replay depends on."""
        import numpy as np

        yield from self.described_steps(batch, options, capacity_bytes)
        if self.varying is not None:
            yield np.array(list(self.varying.events(batch)), dtype=np.int64).tobytes()
        if self.uneven and self.third_step_follows:
            timeline = self.timeline.at(batch)
            sizes = timeline.sizes(batch)
            for other in (*emptier_first_steps(timeline, sizes, batch), fuller_and_fuller(timeline, sizes, batch)):
                yield np.array(other, dtype=np.int64).tobytes()

    def described_steps(self, batch: int, options: AllocatorOptions, capacity_bytes: int | None) -> Iterator[bytes]:
        """All that `replay_steps` depends on, and what follows in the timeline."""
        yield repr((options, capacity_bytes, self.third_step_follows)).encode()
        yield from self.timeline.at(batch).described(batch)

    def _replay(self, batch: int, options: AllocatorOptions, capacity_bytes: int | None) -> Replay:
        def allocator(capacity: int | None = capacity_bytes) -> CachingAllocator:
            return CachingAllocator(options, capacity_bytes=capacity)

        found = self._replay_one_length(batch, allocator())
        for other in self._other_batches(batch, allocator) if found.fits else ():
            found = replace(found, reserved_bytes=max(found.reserved_bytes, other.reserved_bytes), fits=found.fits and other.fits)
        return self._with_fuller_batches(batch, found, allocator) if found.fits and self.uneven and self.third_step_follows else found

    def _other_batches(self, batch: int, allocator: Callable[[], CachingAllocator]) -> Iterator[Replay]:
        """The steps with batches that are not all alike."""
        if self.varying is not None:
            yield replay_events(self.varying.timeline, self.varying.events(batch), allocator())
        if self.uneven and self.third_step_follows:
            timeline = self.timeline.at(batch)
            for sizes in emptier_first_steps(timeline, timeline.sizes(batch), batch):
                yield self._replay_sizes(timeline, sizes, allocator())

    def _with_fuller_batches(self, batch: int, found: Replay, allocator: Callable[..., CachingAllocator]) -> Replay:
        """Batches that are fuller each time reserve more with every one, though most of it is cached: they have to run in what the others
        reserve, where cached segments are given back. Only if they do not, it is taken for needed."""
        timeline = self.timeline.at(batch)
        sizes = fuller_and_fuller(timeline, timeline.sizes(batch), batch)
        if not sizes or self._replay_sizes(timeline, sizes, allocator(found.reserved_bytes)).fits:
            return found
        other = self._replay_sizes(timeline, sizes, allocator())
        return replace(found, reserved_bytes=max(found.reserved_bytes, other.reserved_bytes), fits=other.fits)

    def _replay_one_length(self, batch: int, allocator: CachingAllocator) -> Replay:
        """The steps, then what follows in the timeline."""
        timeline = self.timeline.at(batch)
        steps = self.replay_steps(batch, allocator)
        if not steps.fits:
            return steps
        end = timeline.marks.get("end", len(timeline))
        rest = replay_events(timeline, zip(timeline.blocks[end:].tolist(), timeline.sizes(batch)[end:], strict=True), allocator)
        peaks_later = rest.allocated_bytes > steps.allocated_bytes
        return replace(rest, peak_event=end + rest.peak_event if peaks_later else steps.peak_event)

    def replay_steps(self, batch: int, allocator: CachingAllocator) -> Replay:
        """The two traced steps and a third that repeats the second, up to the moment at which the Trainer would evaluate."""
        timeline = self.timeline.at(batch)
        return self._replay_sizes(timeline, timeline.sizes(batch), allocator)

    def _replay_sizes(self, timeline: Timeline, sizes: list[int], allocator: CachingAllocator) -> Replay:
        end = timeline.marks.get("end", len(timeline))
        traced_steps = replay_events(timeline, zip(timeline.blocks[:end].tolist(), sizes[:end], strict=True), allocator)
        if not traced_steps.fits or not self.third_step_follows:
            return traced_steps
        if self._third is None or self._third[0] is not timeline:
            self._third = timeline, ThirdStep(timeline)
        third = replay_events(timeline, self._third[1].events(sizes), allocator)
        return replace(third, peak_event=traced_steps.peak_event)

    def fits(self, batch: int, budget_bytes: int, *, giving_back: bool = False) -> bool:
        """Does all it reserves stay within `budget_bytes` of device memory, the context included?

        giving_back: or does it run there because a full card makes the allocator give cached segments back?
        """
        room = budget_bytes - self.context_bytes
        return self.replay(batch, capacity_bytes=room).fits if giving_back else self.replay(batch).reserved_bytes <= room

    def largest_batch(self, budget_bytes: int, *, giving_back: bool = False, enough: int | None = None) -> int | None:
        """A batch size that fits where the next does not, by exact replays; None when not even 1 does.

        What is allocated alone, without a replay, says about where that is; from there it is looked for in doubling steps, then bisected.
        enough: nobody asks for more, so where it fits that is the answer, at the price of one replay.
        """
        if (
            enough is not None
            and enough <= self._roughly_largest(budget_bytes)
            and self.fits(enough, budget_bytes, giving_back=giving_back)
        ):
            return enough
        if not self.fits(1, budget_bytes, giving_back=giving_back):
            return None
        low, high = 1, _LARGEST_BATCH + 1
        probe = self._roughly_largest(budget_bytes)
        stride = max(1, probe // 64)
        while high - low > 1:
            probe = min(max(probe, low + 1), high - 1)
            if self.fits(probe, budget_bytes, giving_back=giving_back):
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

    def peaks(self, batches: Sequence[int]) -> tuple[MemoryPeak, ...]:
        """Vectorised: allocated from the envelope, reserved interpolated between replayed anchors. No breakdown."""
        import numpy as np

        if not len(batches):
            return ()
        sizes = np.asarray(batches, dtype=np.int64)
        allocated = self._enveloped(sizes)
        anchors = sorted({round(b) for b in np.geomspace(max(1, sizes.min()), sizes.max(), _ANCHORS).tolist()})
        replays = [self.replay(anchor) for anchor in anchors]
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
            self._envelope = upper_envelope(*self._lines())
        constants, slopes = self._envelope
        peak: np.ndarray[Any, Any] = np.max(constants[:, None] + slopes[:, None] * batches[None, :], axis=0)
        return peak

    def _lines(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Live bytes over the batch; where events come and go with the batch, one line through the peaks of two sizes."""
        import numpy as np

        if self.timeline.at(_FEW) is self.timeline:
            return running_lines(self.timeline)
        few, many = (float(running_lines(self.timeline.at(batch))[0].max()) for batch in (_FEW, _MANY))
        slope = (many - few) / (_MANY - _FEW)
        return np.array([few - slope * _FEW]), np.array([slope])

    # ------------------------------------------------------------------------------------------ explanations

    def _moment(self, batch: int, event: int) -> str:
        timeline = self.timeline.at(batch)
        place = timeline.places[int(timeline.place_of[event])]
        parts = [place.phase, place.module or "the whole model", place.op]
        return ", ".join(part for part in parts if part)

    def _breakdown(self, batch: int, replay: Replay) -> Breakdown:
        """Requested bytes of what is live at the peak, by kind; rounding and unused cache are the fragmentation, so that all adds up."""
        from hfopt.memory.timeline import live_bytes

        live = live_bytes(self.timeline.at(batch), batch, replay.peak_event)
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
