"""The winner is tried on the device: an out-of-memory error sends the next that needs less; on the CPU measured times decide.

On a card one trial is enough: its speed is well predicted and its memory is what must be sure. On the CPU speeds depend on caches that no
roofline knows: the predicted best and the config's own settings are timed, then the neighbouring batch sizes of whichever is faster, until
none of them is. Other processes disturb: the two fastest, where they are close, are timed once more, and the better run of each counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hfopt.schema import Candidate, StepTime, Trial

MOST_FAILURES = 4
MOST_TIMINGS = 7
CLOSE = 0.25  # two processes of the same candidate were seen to differ by so much

Run = Callable[[Candidate], Trial | None]
NeedsBytes = Callable[[Candidate], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """Which of the ranked candidates stands, the trial that says so, and those that ran out of memory."""

    chosen: int | None  # None: each one that was predicted to fit ran out of memory
    trial: Trial | None
    failed: tuple[Trial, ...] = ()
    runs: int = 0


def tried(ranked: Sequence[tuple[Candidate, StepTime]], run: Run, *, needs_bytes: NeedsBytes = lambda c: c.per_device_batch) -> Tried:
    """Walks down the ranking to the first that runs. After an out-of-memory error only what needs less is looked at."""
    failed: list[Trial] = []
    for index, (candidate, _) in enumerate(ranked):
        if failed and needs_bytes(candidate) >= needs_bytes(failed[-1].candidate):
            continue
        if len(failed) >= MOST_FAILURES:
            break
        trial = run(candidate)
        if trial is None:
            return Tried(chosen=index if failed else 0, trial=failed[-1] if failed else None, failed=tuple(failed), runs=len(failed))
        if trial.outcome != "oom":
            return Tried(chosen=index, trial=trial, failed=tuple(failed), runs=len(failed) + 1)
        failed.append(trial)
    return Tried(chosen=_untried(ranked, failed, needs_bytes), trial=failed[-1], failed=tuple(failed), runs=len(failed))


def timed(ranked: Sequence[tuple[Candidate, StepTime]], run: Run, own: Candidate) -> Tried:
    """The fastest measured, from the first of the ranking and the config's own settings on; a trial that fails counts as a run too."""
    places = {candidate: index for index, (candidate, _) in enumerate(ranked)}
    found: dict[Candidate, Trial] = {}
    waiting = list(dict.fromkeys((ranked[0][0], own if own in places else ranked[0][0])))
    while waiting and len(found) < MOST_TIMINGS:
        candidate = waiting.pop(0)
        trial = run(candidate)
        if trial is None:
            return Tried(chosen=0, trial=None, runs=len(found))
        found[candidate] = trial
        good = [one for one in found.values() if one.outcome == "ok"]
        if not waiting and good:
            fastest = min(good, key=_cost_s).candidate
            waiting = [other for other in _neighbours(fastest, places) if other not in found]
    runs = len(found) + _confirm(found, run)
    failed = tuple(one for one in found.values() if one.outcome == "oom")
    good = [one for one in found.values() if one.outcome == "ok"]
    if not good:
        stuck = next((one for one in found.values() if one.outcome != "oom"), None)
        chosen = None if stuck is None else places[stuck.candidate]
        return Tried(chosen=chosen, trial=stuck or failed[-1], failed=failed, runs=runs)
    trial = min(good, key=_cost_s)
    return Tried(chosen=places[trial.candidate], trial=trial, failed=failed, runs=runs)


def _confirm(found: dict[Candidate, Trial], run: Run) -> int:
    """Times the two fastest again where they are close; how many runs that took."""
    good = sorted((one for one in found.values() if one.outcome == "ok"), key=_cost_s)[:2]
    if len(good) < 2 or _cost_s(good[1]) > (1 + CLOSE) * _cost_s(good[0]):
        return 0
    for one in good:
        again = run(one.candidate)
        if again is not None and again.outcome == "ok" and _cost_s(again) < _cost_s(one):
            found[one.candidate] = again
    return len(good)


def _neighbours(candidate: Candidate, pool: Iterable[Candidate]) -> list[Candidate]:
    """The next smaller and the next larger batch with the same other settings."""

    def batch(other: Candidate) -> int:
        return other.per_device_batch

    alike = [c for c in pool if replace(c, per_device_batch=1, accumulation=1) == replace(candidate, per_device_batch=1, accumulation=1)]
    smaller = max((c for c in alike if batch(c) < batch(candidate)), key=batch, default=None)
    larger = min((c for c in alike if batch(c) > batch(candidate)), key=batch, default=None)
    return [c for c in (smaller, larger) if c is not None]


def _untried(ranked: Sequence[tuple[Candidate, StepTime]], failed: Sequence[Trial], needs_bytes: NeedsBytes) -> int | None:
    """After too many failures the one that needs least; None when that failed too."""
    index = min(range(len(ranked)), key=lambda place: needs_bytes(ranked[place][0]))
    return None if any(trial.candidate == ranked[index][0] for trial in failed) else index


def _cost_s(trial: Trial) -> float:
    """All of them run with the same threads, so the CPU time compares them where it is known, whatever else the machine does."""
    return next((seconds for seconds in (trial.cpu_s, trial.step_s) if seconds is not None), float("inf"))
