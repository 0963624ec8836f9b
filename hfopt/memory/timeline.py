"""One timeline for every batch size: what is live when, by kind, how a step repeats, and the inputs that wait for it.

One timeline for every batch size: two traces matched event by event, each size as constant + slope × batch. Sizes that a kernel computes in
another way keep their formula. Where the traces are not the same sequence of events there is no timeline (`coarse` has a rougher answer).

The second traced step again: each repetition has blocks of its own, and frees what the one before it left alive. A step that finds the
cache as the step before left it may still need another segment: what fits depends on which blocks were cut. The first two traced steps are
not alike (the optimizer's states come between them), the third shows what all later ones do.

A rougher curve for a model that does different things at different batch sizes: straight lines through the peaks of two traces. Without
events that match there is no timeline for other batch sizes. What is live at the peak is a line for each kind of memory, and what the
allocator holds beyond it another. It is right at the two traced sizes, and a line between and beyond them.

Where a timeline does not show the window of its steps, the inputs of its further batches are counted by an allocator of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.memory.allocator import AllocatorOptions, CachingAllocator
from hfopt.schema import MemoryPeak
from hfopt.trace.events import FORMULAS, TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from hfopt.trace.events import Category, Trace, Where


FREED = -1


@dataclass(frozen=True, slots=True)
class AffineFormula:
    name: str
    dims: tuple[tuple[int, int], ...]  # (constant, slope) each

    def bytes(self, batch: int) -> int:
        return FORMULAS[self.name](*(constant + slope * batch for constant, slope in self.dims))

    def scaled(self, share: float, batch: int) -> int:
        """With so much of its first dimension."""
        first, *others = (constant + slope * batch for constant, slope in self.dims)
        return FORMULAS[self.name](round(first * share), *others)


@dataclass(frozen=True, slots=True)
class Timeline:
    blocks: np.ndarray[Any, Any]  # which block each event takes or frees
    is_free: np.ndarray[Any, Any]
    constants: np.ndarray[Any, Any]
    slopes: np.ndarray[Any, Any]
    places: list[Where]
    place_of: np.ndarray[Any, Any]
    categories: dict[int, Category]
    marks: dict[str, int]
    formulas: dict[int, AffineFormula] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream
    _sizes: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)  # of the batch last asked for

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def next_block(self) -> int:
        """No block has this number or a higher one."""
        return int(self.blocks.max()) + 1

    @property
    def tiles(self) -> list[int]:
        """The events that take a tile of a loop over rows."""
        return [index for index, formula in self.formulas.items() if formula.name == TILE]

    def at(self, batch: int) -> Timeline:
        """The events of one batch size: the same ones for all of them, unless the model loops over its samples."""
        return self

    def of_window(self, batches: int, *, third: bool) -> Timeline | None:
        """The same with so many batches in a step's window; None where it does not show its windows. third: and a third micro-batch."""
        from hfopt.memory.real_steps import whole_window

        return whole_window(self, batches, third=third)

    def sizes(self, batch: int) -> list[int]:
        """The bytes of each event at a batch size; FREED for a free. A replay asks for them several times, to read them."""
        if batch not in self._sizes:
            self._sizes.clear()
            self._sizes[batch] = self._sizes_of(batch)
        return self._sizes[batch]

    def _sizes_of(self, batch: int) -> list[int]:
        import numpy as np

        sizes = np.rint(self.constants + self.slopes * batch).astype(np.int64)
        sizes[self.is_free] = FREED
        out: list[int] = sizes.tolist()
        known: dict[int, int] = {}  # thousands of events share a few formulas
        for index, formula in self.formulas.items():
            size = known.get(id(formula))
            if size is None:
                size = known[id(formula)] = formula.bytes(batch)
            out[index] = size
        return out

    def described(self, batch: int) -> Iterator[bytes]:
        """All that a replay of it at this batch size depends on."""
        import numpy as np

        yield repr((sorted(self.marks.items()), sorted(self.streams.items()))).encode()
        yield from (part.tobytes() for part in (self.blocks, self.is_free, self.place_of, np.array(self.sizes(batch), dtype=np.int64)))


def combine(first: Trace, second: Trace) -> Timeline:
    """Matches the traces; raises TraceError when they are not the same sequence of events."""
    require_same_events(first, second, f"batch {first.batch} and {second.batch}")
    formulas = _products(first, second)
    for index, formula in first.formulas.items():
        pairs = zip(formula.dims, second.formulas[index].dims, strict=True)
        lines = ((a, (b - a) // (second.batch - first.batch)) for a, b in pairs)
        formulas[index] = AffineFormula(formula.name, tuple((a - slope * first.batch, slope) for a, slope in lines))
    slopes = (_sizes(second) - _sizes(first)) / (second.batch - first.batch)
    return _timeline(first, slopes, formulas)


def _products(first: Trace, second: Trace) -> dict[int, AffineFormula]:
    """Sizes that are no line over the batch because two dimensions follow it: attention among all samples laid in one row."""
    found: dict[int, AffineFormula] = {}
    span = second.batch - first.batch
    for index, one in first.shapes.items():
        two = second.shapes.get(index, ())
        if one == two or len(one) != len(two) or sum(a != b for a, b in zip(one, two, strict=True)) < 2:
            continue
        size, elements = first.events[index][1], math.prod(one)
        whole = all((b - a) % span == 0 for a, b in zip(one, two, strict=True))
        if elements and size % elements == 0 and size // elements * math.prod(two) == second.events[index][1] and whole:
            slopes = [(b - a) // span for a, b in zip(one, two, strict=True)]
            lines = ((a - slope * first.batch, slope) for a, slope in zip(one, slopes, strict=True))
            found[index] = AffineFormula("product", (*lines, (size // elements, 0)))
    return found


def alone(trace: Trace) -> Timeline:
    """One trace, right at its own batch size only."""
    formulas = {index: AffineFormula(one.name, tuple((dim, 0) for dim in one.dims)) for index, one in trace.formulas.items()}
    return _timeline(trace, _sizes(trace) * 0.0, formulas)


def _timeline(trace: Trace, slopes: np.ndarray[Any, Any], formulas: dict[int, AffineFormula]) -> Timeline:
    import numpy as np

    sizes = _sizes(trace)
    return Timeline(
        blocks=np.array([block for block, _, _ in trace.events], dtype=np.int64),
        is_free=sizes == FREED,
        constants=sizes - slopes * trace.batch,
        slopes=slopes,
        places=trace.places,
        place_of=np.array([place for _, _, place in trace.events], dtype=np.int64),
        categories=trace.categories,
        marks=trace.marks,
        formulas=formulas,
        streams=trace.streams,
    )


def _sizes(trace: Trace) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array([size for _, size, _ in trace.events], dtype=np.int64)


def require_same_events(first: Trace, second: Trace, where: str) -> None:
    """The same blocks taken and freed in the same order; TraceError says at which `where` they part."""
    for index, (a, b) in enumerate(zip(first.events, second.events, strict=False)):
        if a[0] != b[0] or (a[1] == FREED) != (b[1] == FREED):
            place = first.places[a[2]]
            raise _differs(where, f"first at {place.op} in {place.module or 'the model'} (event {index})")
    if len(first.events) != len(second.events) or first.formulas.keys() != second.formulas.keys():
        raise _differs(where, f"{len(first.events)} against {len(second.events)} events")


def _differs(where: str, how: str) -> TraceError:
    return TraceError(
        f"the model does different things at {where}: {how}",
        hint="its control flow depends on the batch or on the data, so one trace cannot speak for all of them",
    )


KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "temporaries")


def live_bytes(timeline: Timeline, batch: int, event: int) -> dict[str, int]:
    """Requested bytes of every block live after `event`; the batch's inputs count as activations."""
    live: dict[int, int] = {}
    sizes = timeline.sizes(batch)
    for block, size in zip(timeline.blocks[: event + 1].tolist(), sizes, strict=False):
        if size == FREED:
            live.pop(block, None)
        else:
            live[block] = size
    totals = dict.fromkeys(KINDS, 0)
    for block, size in live.items():
        kind = timeline.categories.get(block, "temporaries")
        totals["activations" if kind == "inputs" else kind] += size
    return totals


def live_over_time(timeline: Timeline, batch: int) -> dict[str, np.ndarray[Any, Any]]:
    """The same after every event: one array over the events per kind."""
    import numpy as np

    changes = {kind: np.zeros(len(timeline), dtype=np.int64) for kind in KINDS}
    taken: dict[int, int] = {}
    for event, (block, size) in enumerate(zip(timeline.blocks.tolist(), timeline.sizes(batch), strict=True)):
        kind = timeline.categories.get(block, "temporaries")
        if size == FREED:
            size = -taken.pop(block, 0)
        else:
            taken[block] = size
        changes["activations" if kind == "inputs" else kind][event] = size
    return {kind: np.cumsum(change) for kind, change in changes.items()}


_NOBODYS = -1  # a block that was never taken: freeing it does nothing


class ThirdStep:
    """What follows the two traced steps."""

    def __init__(self, timeline: Timeline) -> None:
        repetition = Repetition(timeline)
        self._span = slice(repetition.repeated, repetition.end)
        self._left = [(block, FREED) for block in repetition.leftovers(0)]
        self._blocks = repetition.blocks(1)

    def events(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Each a block and a size or FREED; `sizes` are those of the whole timeline."""
        return chain(self._left, zip(self._blocks, sizes[self._span], strict=True))


class Repetition:
    """The second step, to be repeated: which of its blocks are its own, and whose blocks it frees."""

    def __init__(self, timeline: Timeline) -> None:
        import numpy as np

        marks = timeline.marks
        self.begin, self.repeated, self.end = begin, repeated, end = marks["step_0"], marks["step_1"], marks.get("step_2", marks["end"])
        self._blocks = timeline.blocks[repeated:end]
        first, second = _births(timeline, begin, repeated), _births(timeline, repeated, end)
        self._stride = timeline.next_block
        self._own = np.isin(self._blocks, list(second.values()))
        like = {block: second.get(key, _NOBODYS) for key, block in first.items()}
        self._like = np.array([like.get(block, _NOBODYS) for block in self._blocks.tolist()])
        self._carried = ~self._own & np.isin(self._blocks, list(like))
        freed = {*self._blocks[timeline.is_free[repeated:end]].tolist(), *self._like.tolist()}
        self._left = np.array([block for block in second.values() if block not in freed], dtype=np.int64)

    def blocks(self, number: int) -> list[int]:
        """The block of each event in repetition `number`; 0 is the step as traced."""
        import numpy as np

        blocks = self._blocks
        if number:
            before = np.where(self._like >= 0, self._like + (number - 1) * self._stride, _NOBODYS)
            blocks = np.where(self._own, blocks + number * self._stride, np.where(self._carried, before, blocks))
        out: list[int] = blocks.tolist()
        return out

    def leftovers(self, number: int) -> list[int]:
        """Blocks of repetition `number` that nothing would free."""
        out: list[int] = (self._left + number * self._stride).tolist()
        return out


def _births(timeline: Timeline, begin: int, end: int) -> dict[tuple[int, int], int]:
    """The blocks taken in a stretch of the timeline, by place and how many were taken there before."""
    counts: dict[int, int] = {}
    found = {}
    for block, freed, place in zip(
        timeline.blocks[begin:end].tolist(), timeline.is_free[begin:end].tolist(), timeline.place_of[begin:end].tolist(), strict=True
    ):
        if not freed:
            counts[place] = counts.get(place, 0) + 1
            found[place, counts[place]] = block
    return found


COARSE_BATCH = 8  # the second size traced: far enough from the first that a jump does not become a slope
COARSE_NOTE = "a coarse estimate, a straight line through batch {} and {}: {}"


def coarse_timeline(first: MemoryPeak, second: MemoryPeak) -> Timeline:
    """One block for each kind of memory, and one for what is reserved beyond them."""
    import numpy as np

    from hfopt.trace.events import Where

    assert first.breakdown is not None
    assert second.breakdown is not None
    names = [*(f"{kind}_bytes" for kind in KINDS), "fragmentation_bytes"]
    one, two = (np.array([getattr(peak.breakdown, name) for name in names], dtype=np.int64) for peak in (first, second))
    slopes = np.maximum((two - one) / (second.batch - first.batch), 0.0)  # what shrinks does so once, not with every sample
    categories: dict[int, Category] = dict(enumerate(KINDS))  # type: ignore[arg-type]
    return Timeline(
        blocks=np.arange(len(names)),
        is_free=np.zeros(len(names), dtype=bool),
        constants=np.maximum(one, two - slopes * (second.batch - first.batch)) - slopes * first.batch,
        slopes=slopes,
        places=[Where("backward", "", "")],
        place_of=np.zeros(len(names), dtype=np.int64),
        categories=categories,
        marks={},
    )


_SIZES = (2, 3)  # samples, as a trace has them: every tensor's bytes are a line over the batch size


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of a batch, in bytes at two batch sizes."""

    few: tuple[int, ...]
    more: tuple[int, ...]

    @classmethod
    def of(cls, make_batch: Callable[[int], dict[str, Any]]) -> BatchInputs:
        few, more = (_tensor_bytes(make_batch(size)) for size in _SIZES)
        if len(few) != len(more):  # one tensor for each sample or image: what they take together is a line
            few, more = (sum(few),), (sum(more),)
        return cls(few, more)

    @classmethod
    def of_tokens(cls, tokens: int) -> BatchInputs:
        """Ids, mask and labels of so many tokens a sample, eight bytes each."""
        few, more = ((8 * tokens * size,) * 3 for size in _SIZES)
        return cls(few, more)

    def sizes(self, batch: int) -> list[int]:
        """The bytes of each tensor."""
        few, _ = _SIZES
        return [max(0, one + (two - one) * (batch - few)) for one, two in zip(self.few, self.more, strict=True)]

    @functools.cache  # noqa: B019 - a few small values
    def waiting_bytes(self, batch: int, batches: int, options: AllocatorOptions) -> int:
        """What so many batches take beside all others, in whole segments."""
        allocator = CachingAllocator(options)
        sizes = self.sizes(batch)
        for number in range(batches):
            for index, size in enumerate(sizes):
                if size:
                    allocator.allocate(number * len(sizes) + index, size)
        return allocator.peak_reserved


def _tensor_bytes(batch: dict[str, Any]) -> tuple[int, ...]:
    import torch
    from torch.utils._pytree import tree_leaves

    return tuple(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
