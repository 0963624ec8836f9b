"""Memory of the first evaluation: its out-of-memory error comes hours into a run, when nobody looks.

The Trainer's `evaluation_loop` runs the model without gradients beside weights and optimizer state, in a cache that the training steps
have cut up. With metrics to compute, every batch's predictions and labels stay on the card, concatenated, until `eval_accumulation_steps`
batches are done and they move to the host; without that setting until the end. While batch n is joined, three things exist: the n-1
batches before it, its own predictions, and the new whole.

Two evaluation batches are traced, without the training: the replay puts them behind a training curve's own steps, so one trace serves
every training setting, every number of samples and every `eval_accumulation_steps`. With `predict_with_generate` a few tokens are
written; each further one adds what the last of them added. What was traced are plain values: kept on disk, and replayed without torch.

Known limits: the joins between the second batch and the last two are left out (the allocator gives their segments back when the card is
full), every batch counts as full and as long as the longest, and sharded engines are not traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hfopt.memory.allocator import MIN_BLOCK, CachingAllocator
from hfopt.memory.curve import MemoryCurve, Replay, known_or_made, replay_events
from hfopt.memory.step_memory import TRACED_BATCHES
from hfopt.memory.timeline import FREED, Timeline, combine
from hfopt.schema import EvaluationSettings, GenerationSettings, StepSettings, Workload

if TYPE_CHECKING:
    import torch

    from hfopt.trace.events import Trace
    from hfopt.trace.tracer import Tracer, TraceSession
    from hfopt.trace.trainer_step import TrainerLoop

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


Preprocess = Callable[[Any, Any], Any]


def evaluation_curve(
    workload: Workload,
    settings: StepSettings,
    *,
    generation: GenerationSettings | None = None,
    preprocess: Preprocess | None = None,
) -> EvaluationCurve:
    """Traces two batches at two sizes; `preprocess` is the Trainer's preprocess_logits_for_metrics."""
    import torch

    from hfopt.trace.tracer import Tracer, kernels_of, prepared
    from hfopt.trace.trainer_step import TrainerLoop

    tracer = Tracer(prepared(workload, settings), workload.make_batch, kernels_of(settings))
    seen: list[tuple[list[int], list[int]]] = []

    def script(session: TraceSession) -> None:
        loop = TrainerLoop(session, settings, workload.compute_loss)
        session.model.eval()
        try:
            with torch.no_grad(), session.phase("evaluation"):
                seen.append(_evaluate(session, loop, generation, preprocess))
        finally:
            session.model.train()

    first, second = (tracer.record(script, batch) for batch in TRACED_BATCHES)
    low, high = seen
    return EvaluationCurve(
        timeline=combine(first, second),
        predictions=_lines(low[0], high[0]),
        labels=_lines(low[1], high[1]),
        writing=None if generation is None else _writing(tracer, settings, generation),
    )


def _evaluate(
    session: TraceSession, loop: TrainerLoop, generation: GenerationSettings | None, preprocess: Preprocess | None
) -> tuple[list[int], list[int]]:
    """Two rounds of `evaluation_loop`; the bytes of the predictions and of the labels that a round adds."""
    predictions = labels = inputs = None
    for number in range(2):
        session.recorder.mark(f"evaluation_{number}")
        inputs = session.to_device()
        labels = inputs.get("labels")
        predictions = _predict(loop, inputs, generation)
        if preprocess is not None and predictions:
            predictions = _tensors(preprocess(predictions[0] if len(predictions) == 1 else tuple(predictions), labels))
        session.recorder.mark(f"kept_{number}")
    session.recorder.classify(predictions or (), "logits")
    session.recorder.mark("end")
    return [one.nbytes for one in predictions or ()], [one.nbytes for one in _tensors(labels)]


def _predict(loop: TrainerLoop, inputs: dict[str, Any], generation: GenerationSettings | None) -> list[torch.Tensor]:
    """`prediction_step`: all outputs but the loss and what the config leaves out; with generation, the tokens written."""
    import torch

    loss, outputs = loop.loss_and_outputs(inputs, loop.count_items([inputs]))
    loss = loss.detach().mean()
    if generation is not None:
        rows = next(len(value) for value in inputs.values() if isinstance(value, torch.Tensor))
        return [torch.zeros(rows, generation.max_length, dtype=torch.long)]
    if not isinstance(outputs, dict):
        return _tensors(outputs[1:]) if outputs is not None else []
    ignored = getattr(getattr(loop.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
    return _tensors([value for name, value in outputs.items() if name != "loss" and name not in ignored])


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of nested lists, tuples and mappings, as `nested_concat` walks them."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, (list, tuple)) else []


def _lines(low: list[int], high: list[int]) -> tuple[AffineBytes, ...]:
    """Through the two traced batches."""
    few, more = TRACED_BATCHES
    slopes = [(b - a) / (more - few) for a, b in zip(low, high, strict=True)]
    return tuple(AffineBytes(a - slope * few, slope) for a, slope in zip(low, slopes, strict=True))


# ------------------------------------------------------------------------------------------------- predict_with_generate


class _EnoughWritten(Exception):  # noqa: N818 - ends the trace of a generation, nothing failed
    """A few tokens are written, and no fake tensor would ever end the text."""


def _writing(tracer: Tracer, settings: StepSettings, generation: GenerationSettings) -> WritingBytes:
    import torch

    from hfopt.trace.trainer_step import TrainerLoop

    def script(session: TraceSession) -> None:
        loop = TrainerLoop(session, settings, None)
        session.model.eval()
        try:
            with torch.no_grad(), session.phase("evaluation"):
                session.recorder.mark("begin")
                _write(session, loop)
        finally:
            session.model.train()

    marks = ["begin", *(f"token_{number}" for number in range(TRACED_TOKENS))]
    traced = [_peaks_between(tracer.record(script, batch), marks) for batch in TRACED_BATCHES]
    start, last, token = (_lines([low], [high])[0] for low, high in zip(*(_written(peaks) for peaks in traced), strict=True))
    return WritingBytes(start=start, last=last, token=token, settings=generation)


def _written(peaks: list[int]) -> tuple[int, int, int]:
    """Up to the first token, at the last, and what the last added to the one before."""
    return peaks[0], peaks[-1], max(0, peaks[-1] - peaks[-2])


def _write(session: TraceSession, loop: TrainerLoop) -> None:
    """`generate` as Seq2SeqTrainer calls it: accelerate's autocast is around the model's own forward, not around the encoder's."""
    import torch

    model, written = session.model, 0

    def count(input_ids: Any, scores: Any, **_: Any) -> Any:
        nonlocal written
        session.recorder.mark(f"token_{written}")
        written += 1
        if written == TRACED_TOKENS:
            raise _EnoughWritten
        return torch.zeros(len(input_ids), dtype=torch.bool)

    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return loop.converted(lambda: original(*args, **kwargs))

    model.forward = forward
    try:
        inputs = {name: value for name, value in session.to_device().items() if name not in ("labels", "decoder_input_ids")}
        model.generate(**inputs, max_new_tokens=2 * TRACED_TOKENS, num_beams=1, stopping_criteria=[count])
    except _EnoughWritten:
        return
    finally:
        del model.forward


def _peaks_between(trace: Trace, marks: list[str]) -> list[int]:
    """The most bytes live between each mark and the next, above what was live at the first."""
    live, over_time = 0, []
    sizes: dict[int, int] = {}
    for block, size, _ in trace.events:
        if size == FREED:
            live -= sizes.pop(block)
        else:
            sizes[block] = -(-size // MIN_BLOCK) * MIN_BLOCK
            live += sizes[block]
        over_time.append(live)
    begin = trace.marks[marks[0]]
    base = over_time[begin - 1] if begin else 0
    places = [trace.marks[name] for name in marks]
    return [max(over_time[low:high], default=base) - base for low, high in pairwise(places)]
