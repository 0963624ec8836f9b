"""Batches padded to their own longest sample: steps of different lengths through one allocator, because that is what fragments it.

A further trace at a shorter length tells how each size follows the length: not at all, in proportion, with its square, or along a line.
The second traced step is the one that repeats (`repetition`).
Which lengths come is drawn from the spread of the samples, always in the same way: a batch is as long as its longest sample.

Known limits: every size follows the length smoothly (a kernel that rounds it up to a tile is read off a line), and the drawn order is one
of many.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from hfopt.memory.timeline import FREED, Repetition, Timeline, require_same_events
from hfopt.memory.whole_window import fetched_inputs
from hfopt.trace.kernel_sizes import FORMULAS

if TYPE_CHECKING:
    import numpy as np

    from hfopt.schema import LengthSpread
    from hfopt.trace.events import Trace

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
