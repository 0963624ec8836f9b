"""What the first evaluation takes, over the batch size: two traced batches put behind a training curve's own steps.

Plain values: they are traced with torch (`evaluation_step`), kept on disk, and replayed without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hfopt.memory.allocator import CachingAllocator
from hfopt.memory.curve import MemoryCurve, replay_events
from hfopt.memory.kept_replays import Replay, known_or_made
from hfopt.memory.timeline import FREED, Timeline
from hfopt.schema import EvaluationSettings, GenerationSettings

TRACED_TOKENS = 5  # written in a trace: the first fill the cache, from the third on each is like the next


@dataclass(frozen=True, slots=True)
class AffineBytes:
    """Bytes as constant + slope × batch."""

    constant: float
    slope: float

    def at(self, batch: int) -> int:
        return max(0, round(self.constant + self.slope * batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingBytes:
    """What generating takes: up to the first token, at the last traced token, and with each further one."""

    start: AffineBytes
    last: AffineBytes
    token: AffineBytes
    settings: GenerationSettings

    def at(self, batch: int) -> int:
        """Each beam is a row of its own for the decoder; the encoder runs before they are."""
        rows, more = batch * self.settings.beams, max(0, self.settings.max_length - TRACED_TOKENS)
        return max(self.start.at(batch), self.last.at(rows) + more * self.token.at(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationCurve:
    """Two evaluation batches over the batch size, and what each leaves on the card."""

    timeline: Timeline
    predictions: tuple[AffineBytes, ...]  # the tensors that one batch adds, as `compute_metrics` will see them
    labels: tuple[AffineBytes, ...]
    writing: WritingBytes | None = None

    def kept_bytes_per_sample(self, evaluation: EvaluationSettings) -> int:
        kept = (*self.predictions, *self.labels) if evaluation.keeps_predictions else ()
        return sum(line.at(64) for line in kept) // 64

    def replay(
        self, training: MemoryCurve, train_batch: int, evaluation: EvaluationSettings, batch: int, *, capacity_bytes: int | None = None
    ) -> Replay:
        """Training steps, then the first evaluation; the peaks are those of the evaluation alone. A capacity changes nothing that stays
        within it."""
        import numpy as np

        def replayed(most_bytes: int | None) -> Replay:
            def described() -> Iterator[bytes]:
                yield from training.described_steps(train_batch, training.options, most_bytes)
                yield repr((self.timeline.next_block, sorted(self.timeline.streams.items()))).encode()
                yield np.array(list(self._events(evaluation, batch, 0)), dtype=np.int64).tobytes()

            return known_or_made(described, lambda: self._replayed(training, train_batch, evaluation, batch, most_bytes))

        whole = replayed(None)
        return whole if capacity_bytes is None or whole.reserved_bytes <= capacity_bytes else replayed(capacity_bytes)

    def _replayed(
        self, training: MemoryCurve, train_batch: int, evaluation: EvaluationSettings, batch: int, capacity_bytes: int | None
    ) -> Replay:
        allocator = CachingAllocator(training.options, capacity_bytes=capacity_bytes)
        before = training.replay_steps(train_batch, allocator)
        if not before.fits:
            return before
        allocator.peak_allocated, allocator.peak_reserved = allocator.allocated, allocator.reserved
        return replay_events(self.timeline, self._events(evaluation, batch, 8 * training.timeline.next_block), allocator)

    def _events(self, evaluation: EvaluationSettings, batch: int, first_block: int) -> Iterator[tuple[int, int]]:
        kept = _Kept(self, evaluation, batch, first_block + self.timeline.next_block)
        batches = evaluation.kept_batches(batch)
        yield from self._segment("evaluation_0", "kept_0", batch, first_block, kept)
        if batches <= 1:  # one batch, or each lets go of its predictions before the next
            return
        if batches > 2:
            yield from kept.joined(batches - 2)
            yield from kept.joined(batches - 1)
        yield from self._segment("kept_0", "evaluation_1", batch, first_block, kept)
        yield from self._segment("evaluation_1", "kept_1", batch, first_block, kept)
        if batches == 2:
            yield from kept.joined(1)  # the first batch's own tensors, which the trace has let go by now
        yield from kept.gathered()
        yield from kept.joined(batches)

    def _segment(self, begin: str, end: str, batch: int, first_block: int, kept: _Kept) -> Iterator[tuple[int, int]]:
        """The traced events between two marks; what was there before the evaluation is the training's and stays."""
        timeline, marks = self.timeline, self.timeline.marks
        if self.writing is not None and begin.startswith("evaluation"):
            yield from kept.once(self.writing.at(batch))
        sizes = timeline.sizes(batch)
        oldest = _first_block_from(timeline, marks["evaluation_0"])
        for block, size in zip(timeline.blocks[marks[begin] : marks[end]].tolist(), sizes[marks[begin] : marks[end]], strict=True):
            if block >= oldest:
                yield first_block + block, size


@dataclass(slots=True)
class _Kept:
    """The containers of `evaluation_loop`, as blocks of their own."""

    curve: EvaluationCurve
    evaluation: EvaluationSettings
    batch: int
    next_block: int
    _held: dict[str, list[int]] = field(default_factory=dict)

    def once(self, size: int) -> Iterator[tuple[int, int]]:
        """Taken and freed again."""
        block = self._take()
        yield block, size
        yield block, FREED

    def gathered(self) -> Iterator[tuple[int, int]]:
        """Of several ranks each holds what all of them predicted."""
        if self.evaluation.world_size > 1 and self.evaluation.keeps_predictions:
            for line in self.curve.predictions:
                yield self._take(), line.at(self.batch) * self.evaluation.world_size

    def joined(self, batches: int) -> Iterator[tuple[int, int]]:
        """All batches so far as one tensor, made while the one before is there. Not concatenated, the last batch's are its own tensors."""
        if not self.evaluation.keeps_predictions:
            return
        joins = self.evaluation.concatenates
        for name, lines in (("predictions", self.curve.predictions), ("labels", self.curve.labels)):
            before, made = self._held.get(name, []), [self._take() for _ in lines]
            if not joins:
                yield from ((block, FREED) for block in before)
            for block, line in zip(made, lines, strict=True):
                yield block, line.at(self.batch) * (batches if joins else batches - 1) * self.evaluation.world_size
            if joins:
                yield from ((block, FREED) for block in before)
            self._held[name] = made

    def _take(self) -> int:
        self.next_block += 1
        return self.next_block


def _first_block_from(timeline: Timeline, event: int) -> int:
    """Blocks are numbered as they are taken."""
    taken = timeline.blocks[:event]
    return int(taken.max()) + 1 if len(taken) else 0
