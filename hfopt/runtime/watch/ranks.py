"""Which rank makes the others wait, without a collective: each rank leaves a small file, the first rank reads them.

Ranks wait for each other inside backward. A rank that does more than the others therefore comes late to the points between two such
meetings: the begin of the step (its data was late), the end of its forward (it computed longer), or the end of backward (it did something
after it). Lateness is against the median of the other ranks, the median over steps, by wall clocks. On one host they are one clock;
across hosts a constant offset is removed, and with it the third kind.
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

from hfopt.schema import RankLag

Stamps = Mapping[int, tuple[float, float, float]]
_WHERE: tuple[Literal["data"], Literal["forward"], Literal["after backward"]] = ("data", "forward", "after backward")
_MIN_STEPS = 3


def lags(stamps: Mapping[int, Stamps], *, one_host: bool = True) -> tuple[RankLag, ...]:
    """One entry per rank, from the steps that all of them have."""
    if len(stamps) < 2:
        return ()
    steps = sorted(set.intersection(*(set(of_rank) for of_rank in stamps.values())))
    if len(steps) < _MIN_STEPS:
        return ()
    step_s = median((stamps_of[b][0] - stamps_of[a][0]) / (b - a) for stamps_of in stamps.values() for a, b in pairwise(steps))
    return tuple(_lag(rank, stamps, steps, step_s, one_host=one_host) for rank in sorted(stamps))


def _lag(rank: int, stamps: Mapping[int, Stamps], steps: Sequence[int], step_s: float, *, one_host: bool) -> RankLag:
    late = [
        median(
            stamps[rank][step][mark] - median(of_other[step][mark] for other, of_other in stamps.items() if other != rank) for step in steps
        )
        for mark in range(3)
    ]
    if not one_host:
        late = [value - min(late) for value in late]
    begin, forward, after = late
    grown = (begin - after, forward - begin, after)
    where = _WHERE[max(range(3), key=lambda index: grown[index])]
    return RankLag(rank=rank, lag_s=max(0.0, *late), step_s=step_s, where=where)


class RankFile:
    """One rank's note for the first rank: when it came where in its last steps, and what its card did."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank{rank}.json"

    def write(self, *, stamps: Sequence[tuple[int, float, float, float]], summary: Mapping[str, Any], ended: bool) -> None:
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
    stamps = {
        rank: {int(step): (begin, forward, after) for step, begin, forward, after in note["stamps"] if begin >= since}
        for rank, note in notes.items()
    }
    return lags(stamps, one_host=len({note["host"] for note in notes.values()}) <= 1)
