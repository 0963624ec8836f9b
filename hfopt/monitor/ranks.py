"""Which rank makes the others wait, without a collective: each rank leaves a small file, the first rank reads them.

Ranks meet several times in a step (marks.py). A rank that does more than the others comes late to the next meeting, and is on time again
after it. Lateness at a point is against the median of the other ranks; what is late by that much in three of four steps counts, so that the
noise of a busy machine does not. It is the place of the first late point after a meeting that tells where the time goes. Clocks are wall
clocks: one on one host; between hosts a constant offset is removed, and with it lateness that lasts the whole step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from hfopt.monitor.steps import Stamp
from hfopt.schema import RankLag

Where = Literal["after backward", "data", "before forward", "forward"]

Stamps = Mapping[int, tuple[float, ...]]
_WHERE: tuple[Where, ...] = ("after backward", "data", "before forward", "forward")  # in the order of the clock, from meeting to meeting
_MARKS = (3, 0, 1, 2)  # where these stand in a stamp
_MIN_STEPS = 3


def lags(stamps: Mapping[int, Stamps], *, one_host: bool = True) -> tuple[RankLag, ...]:
    """One entry per rank, from the steps that all of them have."""
    if len(stamps) < 2:
        return ()
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in stamps.values())))
    if len(steps) < _MIN_STEPS:
        return ()
    step_s = median((of_rank[b][0] - of_rank[a][0]) / (b - a) for of_rank in stamps.values() for a, b in pairwise(steps))
    return tuple(_lag(rank, stamps, steps, step_s, one_host=one_host) for rank in sorted(stamps))


def _lag(rank: int, stamps: Mapping[int, Stamps], steps: Sequence[int], step_s: float, *, one_host: bool) -> RankLag:
    others = [of_other for other, of_other in stamps.items() if other != rank]
    late = [_usually([stamps[rank][step][mark] - median(other[step][mark] for other in others) for step in steps]) for mark in _MARKS]
    if not one_host:
        late = [value - min(late) for value in late]
    worst = max(late)
    where = next(place for place, value in zip(_WHERE, late, strict=True) if value >= 0.8 * worst or value == worst)
    return RankLag(rank=rank, lag_s=max(0.0, worst), step_s=step_s, where=where)


def _usually(values: list[float]) -> float:
    """What three of four reach."""
    return sorted(values)[len(values) // 4]


class RankFile:
    """One rank's note for the first rank: when it came where in its last steps, and what its card did."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank{rank}.json"

    def write(self, *, stamps: Sequence[Stamp], summary: Mapping[str, Any], ended: bool) -> None:
        note = {"time": time.time(), "host": socket.gethostname(), "stamps": list(stamps), "summary": summary, "ended": ended}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(note))
        temporary.replace(self.path)


def read_notes(folder: Path, world_size: int, *, since: float) -> dict[int, dict[str, Any]]:
    """The notes written since then, by wall clock; a half-known world is still worth comparing."""
    notes: dict[int, dict[str, Any]] = {}
    for rank in range(world_size):
        try:
            note = json.loads((folder / f"rank{rank}.json").read_text())
        except (OSError, ValueError):
            continue
        if note.get("time", 0.0) >= since:
            notes[rank] = note
    return notes


def lags_of_notes(notes: Mapping[int, Mapping[str, Any]], *, since: float) -> tuple[RankLag, ...]:
    stamps = {rank: {int(step): tuple(marks) for step, *marks in note["stamps"] if marks[0] >= since} for rank, note in notes.items()}
    return lags(stamps, one_host=len({note["host"] for note in notes.values()}) <= 1)
