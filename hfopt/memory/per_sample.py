"""A timeline whose length grows with the batch: models that loop over samples or images do each thing once more for each of them.

Two traces, at batch b and b + 1, are matched: the events of the first are those of the second with runs of events left out, which are what
one more sample brings. At another batch size each run is repeated as often as there are more samples. Sizes of matched events are affine
in the batch, as ever; those of a run are a sample's own. Which of several like blocks a repeated event frees follows what the second trace
did: the oldest, or the newest. Where the first trace is no part of the second there is no such timeline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.memory.real_steps import whole_window
from hfopt.memory.timeline import FREED, AffineFormula, Timeline

if TYPE_CHECKING:
    from hfopt.trace.events import Trace

Token = tuple[Any, bool]
"""Where a block is taken (phase, module, operation), and whether it is taken or freed."""


@dataclass(frozen=True, slots=True)
class SampleMatch:
    """The second trace, with what each event is in the first: None in a run that one more sample brings."""

    first: Trace
    second: Trace
    in_first: tuple[int | None, ...]
    pooled: frozenset[int]  # blocks of the second trace whose free is no event of the same block in the first
    newest: frozenset[int]  # frees that take the newest of the pooled blocks, not the oldest


@dataclass(frozen=True, slots=True)
class PerSampleTimeline(Timeline):
    """As the second trace has it; `at` makes the one of another batch size."""

    match: SampleMatch | None = None
    window: tuple[int, bool] | None = None  # what `of_window` was asked for
    _made: dict[int, Timeline] = field(default_factory=dict)

    def at(self, batch: int) -> Timeline:
        if batch not in self._made:
            assert self.match is not None
            if len(self._made) > 8:  # each may hold a hundred thousand events
                self._made.clear()
            self._made[batch] = self._at(self.match, batch)
        return self._made[batch]

    def _at(self, match: SampleMatch, batch: int) -> Timeline:
        made = _expanded(match, batch)
        if self.window is None:
            return made
        batches, third = self.window
        return made.of_window(batches, third=third) or made

    def of_window(self, batches: int, *, third: bool) -> Timeline | None:
        own = whole_window(self, batches, third=third)
        return own if own is None or own is self else replace(self, window=(batches, third), _made={})


def per_sample_timeline(first: Trace, second: Trace) -> PerSampleTimeline:
    """Of traces whose batch sizes differ by one; TraceError where the second does not hold the first."""
    assert second.batch == first.batch + 1
    match = _matched(_like_frees_together(first), _like_frees_together(second))
    own = _expanded(match, second.batch)
    return PerSampleTimeline(
        blocks=own.blocks,
        is_free=own.is_free,
        constants=own.constants,
        slopes=own.slopes,
        places=own.places,
        place_of=own.place_of,
        categories=own.categories,
        marks=own.marks,
        formulas=own.formulas,
        streams=own.streams,
        match=match,
    )


def _like_frees_together(trace: Trace) -> Trace:
    """Blocks freed one after the other may be freed in any order: by where they were taken, so that a part is found in the whole."""
    tokens, marked = _tokens(trace), set(trace.marks.values())
    events, start = list(trace.events), 0
    for index in range(len(events) + 1):
        if index == len(events) or not tokens[index][1] or index in marked:
            run = sorted(range(start, index), key=lambda one: (str(tokens[one][0]), events[one][0]))
            events[start:index] = [trace.events[one] for one in run]
            start = index + 1 if index == len(events) or not tokens[index][1] else index
    return replace(trace, events=events, costs=[])


def _tokens(trace: Trace) -> list[Token]:
    taken: dict[int, Any] = {}
    found: list[Token] = []
    for block, size, place in trace.events:
        if size != FREED:
            taken[block] = trace.places[place]
        found.append((taken[block], size == FREED))
    return found


def _matched(first: Trace, second: Trace) -> SampleMatch:
    ours, theirs = _tokens(first), _tokens(second)
    in_first: list[int | None] = []
    position = 0
    for token in theirs:
        same = position < len(ours) and ours[position] == token
        in_first.append(position if same else None)
        position += same
    if position < len(ours):
        place, batches = ours[position][0], f"batch {first.batch} and {second.batch}"
        raise TraceError(f"the model does different things at {batches}: first at {place.op} in {place.module or 'the model'}")
    return _with_pools(first, second, tuple(in_first))


def _with_pools(first: Trace, second: Trace, in_first: tuple[int | None, ...]) -> SampleMatch:
    like = {  # block of the first trace -> block of the second
        first.events[one][0]: second.events[two][0] for two, one in enumerate(in_first) if one is not None and first.events[one][1] != FREED
    }
    pooled: set[int] = set()
    for two, one in enumerate(in_first):
        block, size, _ = second.events[two]
        if one is None:
            pooled.add(block)
        elif size == FREED and like.get(first.events[one][0]) != block:
            pooled |= {block, *({like[first.events[one][0]]} if first.events[one][0] in like else ())}
    newest: set[int] = set()
    live: dict[Any, list[int]] = defaultdict(list)
    for two, ((where, freed), (block, _, _)) in enumerate(zip(_tokens(second), second.events, strict=True)):
        if block not in pooled:
            continue
        if not freed:
            live[where].append(block)
            continue
        place = live[where].index(block)
        if place and place == len(live[where]) - 1:
            newest.add(two)
        del live[where][place]
    return SampleMatch(first=first, second=second, in_first=in_first, pooled=frozenset(pooled), newest=frozenset(newest))


def _runs(match: SampleMatch) -> Iterator[tuple[range, bool]]:
    """Stretches of the second trace that are in the first, or not."""
    start = 0
    for index in range(1, len(match.in_first) + 1):
        if index == len(match.in_first) or (match.in_first[index] is None) != (match.in_first[start] is None):
            yield range(start, index), match.in_first[start] is None
            start = index


def _expanded(match: SampleMatch, batch: int) -> Timeline:
    """The timeline of one batch size: constants are its sizes, slopes are zero."""
    import numpy as np

    first, second = match.first, match.second
    more = max(0, batch - first.batch)
    order: list[int] = []
    starts: dict[int, int] = {}
    for run, is_extra in _runs(match):
        for number in range(more if is_extra else 1):
            if not number:
                starts.update((event, len(order) + offset) for offset, event in enumerate(run))
            order.extend(run)
        if not more and is_extra:
            starts.update((event, len(order)) for event in run)
    starts[len(match.in_first)] = len(order)
    blocks, categories = _blocks(match, order)
    sizes = np.array([_size(match, event, batch) for event in order], dtype=np.float64)
    formulas = {
        index: _formula(match, event, batch) for index, event in enumerate(order) if event in second.formulas and sizes[index] != FREED
    }
    return Timeline(
        blocks=np.array(blocks, dtype=np.int64),
        is_free=sizes == FREED,
        constants=sizes,
        slopes=np.zeros(len(order)),
        places=second.places,
        place_of=np.array([second.events[event][2] for event in order], dtype=np.int64),
        categories=categories,
        marks={name: starts[event] for name, event in second.marks.items()},
        formulas=formulas,
    )


def _size(match: SampleMatch, event: int, batch: int) -> int:
    size, one = match.second.events[event][1], match.in_first[event]
    if size == FREED or one is None:
        return size
    slope = size - match.first.events[one][1]
    return max(0, size + slope * (batch - match.second.batch))


def _formula(match: SampleMatch, event: int, batch: int) -> AffineFormula:
    formula, one = match.second.formulas[event], match.in_first[event]
    before = match.first.formulas.get(one) if one is not None else None
    dims = formula.dims
    if before is not None:
        dims = tuple(two + (two - a) * (batch - match.second.batch) for a, two in zip(before.dims, dims, strict=True))
    return AffineFormula(formula.name, tuple((dim, 0) for dim in dims))


def _blocks(match: SampleMatch, order: Sequence[int]) -> tuple[list[int], dict[int, Any]]:
    """A block for each event: one of its own for each repetition, and for a free one of those that are live."""
    second, tokens = match.second, _tokens(match.second)
    fresh = max(block for block, _, _ in second.events) + 1
    categories = dict(second.categories)
    live: dict[Any, list[int]] = defaultdict(list)
    taken: set[int] = set()
    found: list[int] = []
    for event in order:
        block, size, _ = second.events[event]
        if block in match.pooled:
            pool = live[tokens[event][0]]
            if size != FREED:
                if block in taken:
                    if block in categories:
                        categories[fresh] = categories[block]
                    block, fresh = fresh, fresh + 1
                pool.append(block)
            elif not pool:
                raise TraceError("the model frees what it did not take, at a batch that was not traced")
            else:
                block = pool.pop(-1 if event in match.newest else 0)
        taken.add(block)
        found.append(block)
    return found, categories
