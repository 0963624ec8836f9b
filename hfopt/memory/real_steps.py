"""What traced steps lack of real ones: batches that are not alike, all batches of a window, and a third micro-batch.

Batches padded to their own longest sample are steps of different lengths through one allocator, because that is what fragments it. A
further trace at a shorter length tells how each size follows the length: not at all, in proportion, with its square, or along a line. The
second traced step is the one that repeats (`timeline.Repetition`). Which lengths come is drawn from the spread of the samples, always in
the same way: a batch is as long as its longest sample. Batches of one length may still differ in the rows that a fused head sees, where
those of padding are left out.

A step with accumulation is traced with two micro-batches at most. `get_batch_samples` (transformers 4.46 on) fetches all of a window's
batches before the first one runs, while those of the window before are still there, and where they are large (images) they lie between the
blocks that the step wants back. And the second micro-batch, which is the first to find gradients, does not always leave the cache as it
found it: the third may need one more segment, all later ones do as the third does. So what a trace lacks is put into its timeline: copies
of a batch's inputs, and the second micro-batch once more.

Known limits: every size follows the length smoothly (a kernel that rounds it up to a tile is read off a line), and the drawn order is one
of many; a step of one rank of several gets its inputs, not a third micro-batch: there the last one also exchanges gradients.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from hfopt.memory.timeline import FREED, AffineFormula, Repetition, Timeline, require_same_events
from hfopt.trace.events import FORMULAS

if TYPE_CHECKING:
    import numpy as np

    from hfopt.schema import LengthSpread
    from hfopt.trace.events import Trace

    Array = np.ndarray[Any, Any]


STEPS = 12  # the last has the longest sample of all
_SHORTER = 0.75
_NO_REPETITIONS = 1 << 20  # of the timeline's blocks: numbers that none has
_ALIGNED = 16  # tokens: kernels pad rows that are not a multiple of 8 or 16, and the two traces must do the same


def shorter_length(longest: int) -> int | None:
    """The second length to trace; None when the longest is too short to have one."""
    length = int(longest * _SHORTER) // _ALIGNED * _ALIGNED if longest % _ALIGNED == 0 else int(longest * _SHORTER) // 8 * 8 + longest % 8
    return length if 0 < length < longest else None


def shortened(batch: dict[str, Any], longest: int, length: int) -> dict[str, Any]:
    """The batch with `length` of its `longest` positions: the middle goes, so that padding on either side stays."""
    import torch

    kept = torch.cat((torch.arange(length - length // 2), torch.arange(longest - length // 2, longest)))
    out = {}
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            for dim in range(1, value.dim()):
                if value.shape[dim] == longest:
                    value = value.index_select(dim, kept)
        out[name] = value
    return out


@dataclass(frozen=True, slots=True)
class Growth:
    """How numbers follow the length: share of the value at the longest = constant + linear × x + square × x², x = length / longest."""

    constant: np.ndarray[Any, Any]
    linear: np.ndarray[Any, Any]
    square: np.ndarray[Any, Any]

    def at(self, x: float) -> np.ndarray[Any, Any]:
        out: np.ndarray[Any, Any] = self.constant + self.linear * x + self.square * x * x
        return out


def growth(full: np.ndarray[Any, Any], short: np.ndarray[Any, Any], longest: int, length: int) -> Growth:
    """Exact for what is constant, proportional to the length or to its square; else the line through both."""
    import numpy as np

    x = length / longest
    share = np.divide(short, full, out=np.ones(len(full)), where=full != 0)
    same = short == full
    proportional = ~same & (short * longest == full * length)
    squared = ~same & ~proportional & (short * longest**2 == full * length**2)
    line = ~(same | proportional | squared)
    slope = np.where(line, (1 - share) / (1 - x), 0.0)
    return Growth(
        constant=np.where(line, 1 - slope, same.astype(float)),
        linear=np.where(line, slope, proportional.astype(float)),
        square=squared.astype(float),
    )


@dataclass(frozen=True, slots=True)
class VaryingLengths:
    """The timeline of several steps at drawn lengths; `timeline` is the one at the longest."""

    timeline: Timeline
    spread: LengthSpread
    sizes: Growth
    dims: dict[int, Growth]  # of the events whose size is a formula
    steps: int = STEPS
    waiting: int = 0  # batches of a window that are not in the timeline: their inputs are there from the start

    def of_window(self, batches: int) -> VaryingLengths:
        return replace(self, waiting=max(0, batches - self.micro_batches))

    def events(self, batch: int, lengths: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
        """Every event of every step: its block, and its size or FREED. `lengths` are those of the micro-batches, else they are drawn."""
        lengths = lengths or drawn_lengths(self.spread, batch, self.steps * self.micro_batches)
        return chain.from_iterable(zip(blocks, sizes, strict=True) for blocks, sizes in self._steps(batch, lengths))

    def _steps(self, batch: int, lengths: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        timeline, micro = self.timeline, self.micro_batches
        repetition = Repetition(timeline)
        begin, repeated = repetition.begin, repetition.repeated
        windows = [lengths[at : at + micro] for at in range(0, len(lengths), micro)]
        yield timeline.blocks[:begin].tolist(), timeline.sizes(batch)[:begin]
        if self.waiting:
            sizes = timeline.sizes(batch)
            inputs = [sizes[event] for event in fetched_inputs(timeline, 0)[0]] * self.waiting
            yield [(_NO_REPETITIONS + number) * timeline.next_block for number in range(len(inputs))], inputs
        yield timeline.blocks[begin:repeated].tolist(), self._sizes(batch, windows[0], 0)
        for number, window in enumerate(windows[1:]):
            if number:
                left = repetition.leftovers(number - 1)
                yield left, [FREED] * len(left)
            yield repetition.blocks(number), self._sizes(batch, window, 1)

    @property
    def micro_batches(self) -> int:
        return max(1, sum(name.startswith("step_1_micro_") for name in self.timeline.marks))

    def _sizes(self, batch: int, window: Sequence[int], step: int) -> list[int]:
        """Each micro-batch at its own length; what comes before the first (the batches arriving) and after the last at theirs."""
        marks = self.timeline.marks
        begin, end = marks[f"step_{step}"], marks.get(f"step_{step + 1}", marks["end"])
        cuts = [begin, *(marks[f"step_{step}_micro_{number}"] for number in range(1, len(window))), end]
        out: list[int] = []
        for length, first, last in zip(window, cuts, cuts[1:], strict=False):
            out += self._sizes_at(batch, length)[first:last]
        return out

    def _sizes_at(self, batch: int, length: int) -> list[int]:
        import numpy as np

        x = length / self.spread.longest
        timeline = self.timeline
        sizes = np.rint((timeline.constants + timeline.slopes * batch) * self.sizes.at(x)).astype(np.int64)
        sizes[timeline.is_free] = FREED
        out: list[int] = sizes.tolist()
        for index, formula in timeline.formulas.items():
            dims = np.array([constant + slope * batch for constant, slope in formula.dims]) * self.dims[index].at(x)
            out[index] = FORMULAS[formula.name](*(round(dim) for dim in dims.tolist()))
        return out


def varying(timeline: Timeline, full: Trace, short: Trace, spread: LengthSpread, length: int) -> VaryingLengths:
    """`full` and `short` are traces at one batch size, the longest length and `length`; raises TraceError when they do not match."""
    import numpy as np

    require_same_events(full, short, f"{spread.longest} and {length} tokens")
    one, two = (np.array([size for _, size, _ in trace.events], dtype=np.int64) for trace in (full, short))
    dims = {
        index: growth(np.array(formula.dims), np.array(short.formulas[index].dims), spread.longest, length)
        for index, formula in full.formulas.items()
    }
    return VaryingLengths(timeline=timeline, spread=spread, sizes=growth(one, two, spread.longest, length), dims=dims)


def drawn_lengths(spread: LengthSpread, batch: int, count: int) -> list[int]:
    """The lengths of `count` batches, the same ones each time. Batches of like lengths begin with the longest, others end with it."""
    dice = random.Random(count)
    if spread.grouped:
        return [spread.longest, *(dice.choice(spread.lengths) for _ in range(count - 1))]
    samples = min(batch, 64)  # the longest of so many is the longest of all, nearly
    return [*(max(dice.choices(spread.lengths, k=samples)) for _ in range(count - 1)), spread.longest]


# ------------------------------------------------------------------------------------------------- rows that a fused head sees

FEWER_ROWS = (1 / 32, 1 / 16, 1 / 8)  # of a full batch's, in the first step: the least is enough that the blocks are too small for one


def emptier_first_steps(timeline: Timeline, sizes: list[int], batch: int) -> Iterator[list[int]]:
    """The sizes with a first step whose batches have fewer rows for a fused head.

    A tile that is not full is as large as its rows, so a fuller batch finds no block that is large enough and takes another segment; by
    then states and gradients may lie in the last one, or not have found room there, and it cannot be given back on a full card. Which of
    it happens hangs on a few rows, so several shares are tried. Nothing where every tile is full, or where there is none."""
    marks, tiles = timeline.marks, timeline.tiles
    for share in FEWER_ROWS if "step_1" in marks else ():
        fewer = {index: timeline.formulas[index].scaled(1 - share, batch) for index in tiles}
        if any(sizes[index] != size for index, size in fewer.items()):
            yield [fewer.get(index, size) if marks["step_0"] <= index < marks["step_1"] else size for index, size in enumerate(sizes)]


def fuller_and_fuller(timeline: Timeline, sizes: list[int], batch: int) -> list[int]:
    """The sizes with each batch of a window of several fuller than the last, through both steps; none where there is no such window."""
    tiles = timeline.tiles
    starts = sorted(event for name, event in timeline.marks.items() if "_micro_" in name)
    if len(starts) <= 2 or not tiles:
        return []
    found = list(sizes)
    for index in tiles:
        to_come = len(starts) - bisect_right(starts, index)  # batches, until the full one
        found[index] = timeline.formulas[index].scaled(1 - to_come * FEWER_ROWS[0], batch)
    return found if found != sizes else []


Known = TypeVar("Known")


def fetched_inputs(timeline: Timeline, step: int) -> list[list[int]]:
    """The events that take each batch of a step's window; none where the timeline does not show them."""
    marks = timeline.marks
    starts = sorted(event for name, event in marks.items() if name.startswith(f"fetch_{step}_"))
    if not starts:
        return []
    ends = [*starts[1:], marks.get(f"step_{step}_micro_0", 0)]
    batches = [[event for event in range(*span) if _takes_input(timeline, event)] for span in zip(starts, ends, strict=True)]
    return batches if all(batches) else []


def _takes_input(timeline: Timeline, event: int) -> bool:
    return not timeline.is_free[event] and timeline.categories.get(int(timeline.blocks[event])) == "inputs"


def whole_window(timeline: Timeline, batches: int, *, third: bool) -> Timeline | None:
    """The timeline with so many batches in each window, and a third micro-batch where there are more than two. The timeline itself where
    nothing is to be added, None where it does not show its windows."""
    fetched = [fetched_inputs(timeline, step) for step in (0, 1)]
    if not fetched[0] or len(fetched[0]) != len(fetched[1]):
        return None
    more, traced = batches - len(fetched[0]), sum(name.startswith("step_1_micro_") for name in timeline.marks)
    repeats = third and traced == 2 < batches
    return _Longer(timeline).with_batches(fetched, max(0, more), third=repeats) if more > 0 or repeats else timeline


class _Longer:
    """The longer timeline as it grows: stretches of the traced one, and between them copies with blocks of their own."""

    def __init__(self, timeline: Timeline) -> None:
        self._traced = timeline
        self._next_block = timeline.next_block
        self._pieces: list[tuple[Array, Array]] = []  # which events of the traced timeline, and the blocks that they take or free
        self._starts: list[tuple[int, int]] = []  # of each stretch of the traced timeline: there, and here
        self._copied: list[tuple[int, int]] = []  # the same of a copied micro-batch
        self._origins: dict[int, int] = {}  # of each new block
        self._done = self._length = 0

    def with_batches(self, fetched: list[list[list[int]]], more: int, *, third: bool) -> Timeline:
        import numpy as np

        waiting: list[int] = []
        for step, inputs in enumerate(fetched):
            first = np.array(inputs[0])
            self._up_to(inputs[0][-1] + 1)
            before, waiting = waiting, []
            for _ in range(more):
                copies = self._new_blocks(self._traced.blocks[first])
                waiting += copies.tolist()
                self._put(first, copies)
            self._up_to(inputs[-1][-1] + 1)
            if before:  # the window before is let go when this one is there
                self._put(np.full(len(before), self._a_free()), np.array(before))
            if third:
                self._repeat(self._traced.marks[f"step_{step}_micro_1"])
        self._up_to(len(self._traced))
        return self._made()

    def _a_free(self) -> int:
        """Any event that frees: where it stood does not matter."""
        return int(self._traced.is_free.argmax())

    def _up_to(self, event: int) -> None:
        import numpy as np

        span = np.arange(self._done, event)
        self._starts.append((self._done, self._length))
        self._put(span, self._traced.blocks[span])
        self._done = event

    def _repeat(self, begin: int) -> None:
        """The micro-batch that begins there, once more: what it takes and keeps is let go at its end, whose blocks it frees are gone."""
        import numpy as np

        end = self._update_after(begin)
        self._up_to(end)
        span = np.arange(begin, end)
        blocks, freed = self._traced.blocks[span], self._traced.is_free[span]
        own = np.unique(blocks[~freed])
        span, blocks, freed = (one[np.isin(blocks, own)] for one in (span, blocks, freed))
        copies = self._new_blocks(own)
        renamed = copies[np.searchsorted(own, blocks)]
        self._copied += zip(span.tolist(), range(self._length, self._length + len(span)), strict=True)
        self._put(span, renamed)
        kept = copies[~np.isin(own, blocks[freed])]
        self._put(np.full(len(kept), self._a_free()), kept)

    def _update_after(self, event: int) -> int:
        """Where the optimizer first takes something."""
        timeline = self._traced
        for at in range(event, len(timeline)):
            if not timeline.is_free[at] and timeline.places[int(timeline.place_of[at])].phase == "optimizer":
                return at
        return event

    def _new_blocks(self, like: Array) -> Array:
        import numpy as np

        made = np.arange(self._next_block, self._next_block + len(like))
        self._next_block += len(like)
        self._origins.update(zip(made.tolist(), like.tolist(), strict=True))
        return made

    def _put(self, events: Array, blocks: Array) -> None:
        self._pieces.append((events, blocks))
        self._length += len(events)

    def _made(self) -> Timeline:
        import numpy as np

        timeline = self._traced
        order = np.concatenate([events for events, _ in self._pieces])
        return Timeline(
            blocks=np.concatenate([blocks for _, blocks in self._pieces]),
            is_free=timeline.is_free[order],
            constants=timeline.constants[order],
            slopes=timeline.slopes[order],
            places=timeline.places,
            place_of=timeline.place_of[order],
            categories=timeline.categories | self._of_copies(timeline.categories),
            marks={name: self._now_at(event) for name, event in timeline.marks.items()},
            formulas=dict(self._formulas()),
            streams=timeline.streams | self._of_copies(timeline.streams),
        )

    def _of_copies(self, known: dict[int, Known]) -> dict[int, Known]:
        return {made: known[origin] for made, origin in self._origins.items() if origin in known}

    def _now_at(self, event: int) -> int:
        there, here = max(start for start in self._starts if start[0] <= event)
        return here + event - there

    def _formulas(self) -> Iterator[tuple[int, AffineFormula]]:
        known = self._traced.formulas
        for event, formula in known.items():
            yield self._now_at(event), formula
        for event, now_at in self._copied:
            if event in known:
                yield now_at, known[event]
