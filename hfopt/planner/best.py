"""Best-first search that traces only what could win: cheap lower bounds first, exact prices when a candidate comes to the front.

A candidate waits in a heap under a lower bound of its step time. At the front it is priced exactly (which may cost a trace) and goes back;
at the front again it is held against its settings' largest batch. What surely does not fit is never priced. The first that fits is the
best; everything whose bound lies above it, ties included, is left unpriced. With true bounds the answer is that of an exhaustive search.

What a batch reserves does not always grow with it, so that the winner is asked once more, for its own batch; one that does not fit is left
out and the search made again, with all prices at hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hfopt.planner.feasible import bound_reason, hole_reason, split
from hfopt.planner.rank import TIE, rank
from hfopt.schema import Candidate, Rejection, StepTime


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
class Found:
    ranked: tuple[tuple[Candidate, StepTime], ...]  # the candidates that fit, best first; () when nothing does
    rejected: tuple[Rejection, ...]


def best_first(candidates: Sequence[Candidate], models: Models, budget_bytes: int, *, current: Candidate | None = None) -> Found:
    """The candidates that fit in their order, and the others with their reasons."""
    left_out: list[Rejection] = []
    while True:
        out = {one.candidate for one in left_out}
        found = _searched([one for one in candidates if one not in out], models, budget_bytes, current)
        if not found.ranked or models.fits(winner := found.ranked[0][0]):
            return replace(found, rejected=(*left_out, *found.rejected))
        left_out.append(Rejection(candidate=winner, reason=hole_reason(winner, budget_bytes)))


def _searched(candidates: Sequence[Candidate], models: Models, budget_bytes: int, current: Candidate | None) -> Found:
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
    return Found(ranked=rank(fitting, fitting.__getitem__, current=current), rejected=tuple(rejected))


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
