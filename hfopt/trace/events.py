"""What a trace holds (blocks taken and freed, in order), and a trace made of what PyTorch's own allocator noted of real steps.

Plain values: they are recorded with torch (`recorder`), and read without it.

The allocator numbers nothing, but it counts: after so many blocks taken and so many freed, a moment of the run is a place in its history.
What lives when the first of the two steps begins (weights, optimizer states, workspaces) is put before them, so that a trace of two
later steps looks like one that began with the model's move to the card: weights and states in their order, then the rest by size, because
a workspace of cuBLAS may be older than the run.

Known limit: the first steps, which compile, are not in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hfopt.trace.kernel_sizes import Formula

Phase = Literal["load", "forward", "backward", "optimizer", "evaluation"]
Category = Literal["weights", "gradients", "optimizer", "activations", "logits", "inputs", "temporaries"]

FREED = -1


@dataclass(frozen=True, slots=True)
class Where:
    """What ran when a block was taken."""

    phase: Phase
    module: str
    op: str


@dataclass(slots=True)
class Trace:
    """One recorded run: events in order, each (block, bytes or FREED, index into places)."""

    batch: int
    events: list[tuple[int, int, int]] = field(default_factory=list)
    formulas: dict[int, Formula] = field(default_factory=dict)  # by event: sizes that are no affine function of the batch
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by event, of tensors with several dimensions
    places: list[Where] = field(default_factory=list)
    categories: dict[int, Category] = field(default_factory=dict)  # by block
    costs: list[tuple[Phase, str, Any]] = field(default_factory=list)  # phase, op and cost of each kernel while `costing` is on
    marks: dict[str, int] = field(default_factory=dict)  # named moments, as event indices
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream

    def sort_frees(self) -> None:
        """Blocks freed one after the other leave the same free memory in any order; sorted, two traces compare. Marks stay between."""
        start = 0
        events, marked = self.events, set(self.marks.values())
        for index, (_, size, _) in enumerate([*events, (0, 0, 0)]):
            if size != FREED or index in marked:
                if index - start > 1:
                    events[start:index] = sorted(events[start:index])
                start = index if size == FREED else index + 1


_PLACES: tuple[Phase, ...] = ("load", "forward", "backward", "optimizer")
_PHASES: dict[str, Phase] = {"backward": "backward", "optimizer": "optimizer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Where a run was: what begins there, after so many events of the allocator."""

    begins: str  # "run", "built", "step", "forward", "backward", "optimizer", "end"
    event: int


@dataclass(frozen=True, slots=True)
class _Block:
    number: int
    size: int
    born: int  # the event that took it


def trace_of(events: Sequence[tuple[int, int]], moments: Sequence[Moment], batch: int, *, skipped_steps: int) -> Trace:
    """`events` are (address, bytes or FREED) since the process began; `moments` those of one run; two steps follow the skipped."""
    steps = [moment.event for moment in moments if moment.begins == "step"]
    begin, middle, end = steps[skipped_steps], steps[skipped_steps + 1], moments[-1].event
    trace = Trace(batch, places=[Where(phase, "", "") for phase in _PLACES])
    live = _live(events[:begin])
    kept = {address: _kept(born, moments) for address, (_, born) in live.items()}
    order = {"weights": 0, "optimizer": 1, None: 2}
    first = sorted(live, key=lambda address: (order[kept[address]], live[address][kept[address] is not None]))
    numbers = {address: number for number, address in enumerate(first)}
    trace.events = [(numbers[address], live[address][0], 0) for address in first]
    trace.categories = {numbers[address]: kind for address, kind in kept.items() if kind is not None}
    offset = len(trace.events) - begin
    trace.marks = {"step_0": begin + offset, "step_1": middle + offset, "end": end + offset}
    phases = _phases(moments, begin, end)
    blocks: list[_Block] = []
    for index in range(begin, end):
        address, size = events[index]
        place = _PLACES.index(phases[index - begin])
        if size == FREED:
            trace.events.append((numbers.pop(address), FREED, place))
            continue
        number = len(live) + len(blocks)
        numbers[address] = number
        blocks.append(_Block(number, size, index))
        trace.events.append((number, size, place))
    trace.categories |= _categories(blocks, trace.events, moments, offset)
    trace.sort_frees()
    return trace


def _live(events: Sequence[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """By address, in the order they were taken: bytes and the event that took it."""
    live: dict[int, tuple[int, int]] = {}
    for index, (address, size) in enumerate(events):
        if size == FREED:
            live.pop(address, None)  # taken before the history began
        else:
            live[address] = size, index
    return live


def _phases(moments: Sequence[Moment], begin: int, end: int) -> list[Phase]:
    """Of each event between the two; what is done between steps belongs to the next forward."""
    found: list[Phase] = ["forward"] * (end - begin)
    for moment, following in itertools.pairwise(moments):
        phase = _PHASES.get(moment.begins)
        if phase is not None:
            for index in range(max(moment.event, begin), min(following.event, end)):
                found[index - begin] = phase
    return found


def _kept(born: int, moments: Sequence[Moment]) -> Literal["weights", "optimizer"] | None:
    """Of what lives when the steps begin: weights are built, states are taken by the optimizer."""
    begin, built = (next(moment.event for moment in moments if moment.begins == name) for name in ("run", "built"))
    if begin <= born < built:
        return "weights"
    return "optimizer" if any(start <= born < stop for start, stop in _spans(moments, "optimizer")) else None


def _spans(moments: Sequence[Moment], name: str) -> Iterator[tuple[int, int]]:
    for moment, following in itertools.pairwise(moments):
        if moment.begins == name:
            yield moment.event, following.event


def _categories(
    blocks: Sequence[_Block], events: Sequence[tuple[int, int, int]], moments: Sequence[Moment], offset: int
) -> dict[int, Category]:
    """What the forward takes and the backward finds are activations, what the backward takes and the optimizer finds gradients."""
    freed = {number: index - offset for index, (number, size, _) in enumerate(events) if size == FREED}
    found: dict[int, Category] = {}
    kinds: tuple[tuple[str, Category], ...] = (("step", "inputs"), ("forward", "activations"), ("backward", "gradients"))
    for name, kind in kinds:
        for start, stop in _spans(moments, name):
            for block in blocks:
                if start <= block.born < stop and freed.get(block.number, stop) >= stop:
                    found[block.number] = kind
    return found
