"""The winner is tried, and what was measured corrects the curve for this job: where that moves a limit, the search is asked again.

A measured peak above the budget rules the winner out although it ran; one below what was predicted may let a larger batch in, which is
then tried as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from hfopt.errors import NothingFits
from hfopt.planner.best import Found
from hfopt.planner.pricing import Pricing
from hfopt.planner.trials import Run, Tried, timed, tried
from hfopt.schema import Candidate, Correction, StepTime

CLOSE_ENOUGH = 0.01  # an estimate this near to the measurement stands: the next limit would move by less than headroom is for
MOST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmed:
    found: Found
    verdict: Tried
    correction: Correction | None = None

    @property
    def winner(self) -> tuple[Candidate, StepTime]:
        assert self.verdict.chosen is not None
        return self.found.ranked[self.verdict.chosen]


def confirmed(found: Found, search: Callable[[], Found], pricing: Pricing, run: Run, *, timed_from: Candidate | None = None) -> Confirmed:
    """`search` makes the search again with the corrected pricing; `timed_from`: measured times decide, from these settings on."""
    state = _tried(found, pricing, run, timed_from)
    for _ in range(MOST_ROUNDS):
        error = state.correction.memory_error if state.correction is not None else None
        if state.correction is None or error is None or abs(error) <= CLOSE_ENOUGH:
            break
        pricing.correct(state.correction)
        again = search()
        if not again.ranked:
            break
        if again.ranked[0][0] == state.winner[0]:
            return replace(state, found=again, verdict=replace(state.verdict, chosen=0))
        retried = _tried(again, pricing, run, timed_from)
        runs = state.verdict.runs + retried.verdict.runs
        failed = (*state.verdict.failed, *retried.verdict.failed)
        state = replace(retried, verdict=replace(retried.verdict, runs=runs, failed=failed))
    return state


def _tried(found: Found, pricing: Pricing, run: Run, timed_from: Candidate | None) -> Confirmed:

    @cache
    def needs() -> dict[Candidate, int]:
        """Asked only after a failure."""
        ranked = [candidate for candidate, _ in found.ranked]
        return {c: memory.device_bytes for c, memory in zip(ranked, pricing.nearest_memories(ranked), strict=True)}

    if timed_from is not None:
        verdict = timed(found.ranked, run, timed_from)
    else:
        verdict = tried(found.ranked, run, needs_bytes=lambda candidate: needs()[candidate])
    trial = verdict.trial
    if verdict.chosen is None:
        assert trial is not None
        raise NothingFits(
            f"nothing fits: {verdict.runs} setting(s) were predicted to fit and ran out of memory in the dry run: {trial.message}",
            hint="free memory on the device, leave more of it with --headroom, or see --allow",
        )
    correction = pricing.compare(trial) if trial is not None and trial.outcome == "ok" else None
    return Confirmed(found=found, verdict=verdict, correction=correction)
