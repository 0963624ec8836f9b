"""The winner is tried on the device: an out-of-memory error sends the next that needs less, a measured time decides among the close ones.

On a card one trial is enough: its speed is well predicted and its memory is what must be sure. On the CPU speeds depend on caches that no
roofline knows, so the best few are timed and the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfopt.schema import Candidate, StepTime, Trial

MOST_FAILURES = 4
CLOSE = 0.35  # candidates predicted within this of the best are timed against it

Run = Callable[[Candidate], Trial | None]
NeedsBytes = Callable[[Candidate], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """Which of the ranked candidates stands, the trial that says so, and those that ran out of memory."""

    chosen: int | None  # None: each one that was predicted to fit ran out of memory
    trial: Trial | None
    failed: tuple[Trial, ...] = ()
    runs: int = 0


def tried(
    ranked: Sequence[tuple[Candidate, StepTime]], run: Run, *, timings: int = 1, needs_bytes: NeedsBytes = lambda c: c.per_device_batch
) -> Tried:
    """Walks down the ranking; `timings` is how many may be timed. After an out-of-memory error only what needs less is looked at."""
    failed: list[Trial] = []
    good: list[tuple[int, Trial]] = []
    best_s = ranked[0][1].step_s
    for index, (candidate, time) in enumerate(ranked):
        if failed and needs_bytes(candidate) >= needs_bytes(failed[-1].candidate):
            continue
        if len(failed) >= MOST_FAILURES or (good and (len(good) >= timings or time.step_s > best_s * (1 + CLOSE))):
            break
        trial = run(candidate)
        if trial is None:
            return Tried(chosen=index if failed else 0, trial=failed[-1] if failed else None, failed=tuple(failed), runs=len(failed))
        if trial.outcome == "oom":
            failed.append(trial)
            continue
        good.append((index, trial))
        if trial.outcome != "ok":
            break
    runs = len(failed) + len(good)
    if not good:
        return Tried(chosen=_untried(ranked, failed, needs_bytes), trial=failed[-1], failed=tuple(failed), runs=runs)
    fine = [pair for pair in good if pair[1].outcome == "ok"] or good
    chosen, trial = min(fine, key=lambda pair: _cost_s(pair[1]))
    return Tried(chosen=chosen, trial=trial, failed=tuple(failed), runs=runs)


def _untried(ranked: Sequence[tuple[Candidate, StepTime]], failed: Sequence[Trial], needs_bytes: NeedsBytes) -> int | None:
    """After too many failures the one that needs least; None when that failed too."""
    index = min(range(len(ranked)), key=lambda place: needs_bytes(ranked[place][0]))
    return None if any(trial.candidate == ranked[index][0] for trial in failed) else index


def _cost_s(trial: Trial) -> float:
    """All of them run with the same threads, so the CPU time compares them where it is known, whatever else the machine does."""
    return next((seconds for seconds in (trial.cpu_s, trial.step_s) if seconds is not None), float("inf"))
