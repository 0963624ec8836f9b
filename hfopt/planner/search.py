"""Which candidates fit, and which of them is fastest: best-first, so that only what could win is traced.

The order of the candidates: predicted time per effective batch; where two are as good as equal, the one that risks less. Times within `TIE`
of the group's best are equal: no roofline is finer than that. Among equals: the config's own settings, for a change is made for a gain;
else its own batch, for a larger one takes memory; else fewer accumulation steps (and with them the batch is said), no checkpointing, the
checkpointing and the precision the user has.

Which candidates fit: each is held against the largest batch its memory curve allows, and a rejected one keeps its reason. The curve answers
once per setting (precision, checkpointing, ...), not once per candidate, so a hundred times the candidates cost the same.

Best-first search that traces only what could win: cheap lower bounds first, exact prices when a candidate comes to the front. A candidate
waits in a heap under a lower bound of its step time. At the front it is priced exactly (which may cost a trace) and goes back; at the front
again it is held against its settings' largest batch. What surely does not fit is never priced. The first that fits is the best; everything
whose bound lies above it, ties included, is left unpriced. With true bounds the answer is that of an exhaustive search.

What a batch reserves does not always grow with it, so that the winner is asked once more, for its own batch; one that does not fit is left
out and the search made again, with all prices at hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hfopt.schema import Candidate, Rejection, StepTime, TimeModel
from hfopt.units import format_bytes

TIE = 0.02  # ratios between settings are met to 3 % in the median (benchmarks/speed_accuracy.py): less than that decides nothing


def rank(candidates: Iterable[Candidate], time: TimeModel, *, current: Candidate | None = None) -> tuple[tuple[Candidate, StepTime], ...]:
    """Fastest first. All candidates share the effective batch, so the time of their optimizer step compares them."""
    priced = sorted(
        ((candidate, time(candidate)) for candidate in candidates), key=lambda pair: (pair[1].step_s, _preference(pair[0], current))
    )
    ordered: list[tuple[Candidate, StepTime]] = []
    start = 0
    while start < len(priced):
        end = start
        while end < len(priced) and priced[end][1].step_s <= priced[start][1].step_s * (1 + TIE):
            end += 1
        ordered.extend(sorted(priced[start:end], key=lambda pair: _preference(pair[0], current)))
        start = end
    return tuple(ordered)


def _preference(candidate: Candidate, current: Candidate | None) -> tuple[object, ...]:
    extras: Sequence[bool] = (
        candidate.torch_compile,
        candidate.use_liger_kernel,
        candidate.optim is not None,
        candidate.attn_implementation is not None,
    )
    return (
        candidate != current,  # a change is made for a gain
        sum(extras),
        current is not None and candidate.per_device_batch != current.per_device_batch,  # so is a larger batch, with the memory it takes
        candidate.accumulation,
        candidate.checkpointing.on,
        current is not None and candidate.checkpointing != current.checkpointing,
        current is not None and candidate.precision != current.precision,
        candidate.checkpointing.every_n_layers,
        candidate.precision,
    )


LargestBatch = Callable[[Candidate], int | None]
"""The largest per-device batch that fits with this candidate's other settings; None when not even one sample does."""


def split(
    candidates: Iterable[Candidate], largest_batch: LargestBatch, budget_bytes: int
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that fit, and the others with the reason. Order is kept."""
    fitting: list[Candidate] = []
    rejected: list[Rejection] = []
    for candidate in candidates:
        limit = largest_batch(candidate)
        if limit is not None and candidate.per_device_batch <= limit:
            fitting.append(candidate)
        else:
            rejected.append(Rejection(candidate=candidate, reason=_reason(candidate, limit, budget_bytes)))
    return tuple(fitting), tuple(rejected)


def _reason(candidate: Candidate, limit: int | None, budget_bytes: int) -> str:
    budget = format_bytes(budget_bytes)
    if limit is None:
        return f"not even one sample fits into {budget}"
    return f"batch {candidate.per_device_batch} does not fit into {budget}: at most {limit} with these settings"


def bound_reason(candidate: Candidate, at_most: int, budget_bytes: int) -> str:
    """For one that was not traced, above a bound that no batch passes: less may be too much as well."""
    if not at_most:
        return _reason(candidate, None, budget_bytes)
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at most {at_most}, perhaps fewer"


def hole_reason(candidate: Candidate, budget_bytes: int) -> str:
    """For one that its settings' largest batch would let in."""
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at this batch more is kept in the cache"


class Models(Protocol):
    """What the search asks of the estimates."""

    def bound_s(self, candidate: Candidate) -> float:
        """No step of this candidate is faster; cheap."""

    def time(self, candidate: Candidate) -> StepTime:
        """The exact prediction; may trace."""

    def largest_batch(self, candidate: Candidate) -> int | None:
        """The largest batch that fits with its settings; may trace."""

    def fits(self, candidate: Candidate) -> bool:
        """Does it fit at its very batch? May trace."""

    def known(self, candidate: Candidate) -> bool:
        """Both answers are at hand without a trace."""

    def known_limit(self, candidate: Candidate) -> int | None:
        """Like largest_batch but never traces, and may be too small."""

    def at_most(self, candidate: Candidate) -> int | None:
        """No batch above this fits, 0 included; None: not known. Never traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    ranked: tuple[tuple[Candidate, StepTime], ...]  # the candidates that fit, best first; () when nothing does
    rejected: tuple[Rejection, ...]


def best_first(candidates: Sequence[Candidate], models: Models, budget_bytes: int, *, current: Candidate | None = None) -> SearchResult:
    """The candidates that fit in their order, and the others with their reasons."""
    left_out: list[Rejection] = []
    while True:
        out = {one.candidate for one in left_out}
        found = _searched([one for one in candidates if one not in out], models, budget_bytes, current)
        if not found.ranked or models.fits(winner := found.ranked[0][0]):
            return replace(found, rejected=(*left_out, *found.rejected))
        left_out.append(Rejection(candidate=winner, reason=hole_reason(winner, budget_bytes)))


def _searched(candidates: Sequence[Candidate], models: Models, budget_bytes: int, current: Candidate | None) -> SearchResult:
    heap = [(models.bound_s(candidate), False, index) for index, candidate in enumerate(candidates)]
    heapq.heapify(heap)
    fitting: dict[Candidate, StepTime] = {}
    rejected: list[Rejection] = []
    best_s = float("inf")
    left: list[tuple[float, int]] = []
    while heap:
        seconds, exact, index = heapq.heappop(heap)
        candidate = candidates[index]
        if seconds > best_s * (1 + TIE):
            left.append((seconds, index))
            continue
        at_most = models.at_most(candidate)
        if at_most is not None and at_most < candidate.per_device_batch:
            rejected.append(Rejection(candidate=candidate, reason=bound_reason(candidate, at_most, budget_bytes)))
            continue
        if not exact:
            tighter = models.bound_s(candidate)
            if tighter > seconds:
                heapq.heappush(heap, (tighter, False, index))
            else:
                heapq.heappush(heap, (models.time(candidate).step_s, True, index))
            continue
        kept, refused = split([candidate], models.largest_batch, budget_bytes)
        rejected.extend(refused)
        if kept:
            fitting[candidate] = models.time(candidate)
            best_s = min(best_s, seconds)
    _add_the_rest(left, candidates, models, budget_bytes, best_s, fitting, rejected)
    return SearchResult(ranked=rank(fitting, fitting.__getitem__, current=current), rejected=tuple(rejected))


def _add_the_rest(
    left: Sequence[tuple[float, int]],
    candidates: Sequence[Candidate],
    models: Models,
    budget_bytes: int,
    best_s: float,
    fitting: dict[Candidate, StepTime],
    rejected: list[Rejection],
) -> None:
    """What cannot win: ranked where the answer is at hand, else named with its bound."""
    for seconds, index in left:
        candidate = candidates[index]
        if models.known(candidate):
            kept, refused = split([candidate], models.known_limit, budget_bytes)
            rejected.extend(refused)
            if kept:
                fitting[candidate] = models.time(candidate)
        else:
            slower = 100 * (seconds / best_s - 1)
            rejected.append(Rejection(candidate=candidate, reason=f"at least {slower:.0f} % slower than the best that fits: not traced"))
