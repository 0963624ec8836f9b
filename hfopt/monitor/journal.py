"""All that a session writes: the log, the table, the live file and each rank's note.

Which rank makes the others wait, without a collective: each rank leaves a small file, the first rank reads them. Ranks meet several times
in a step (`step_clock`). A rank that does more than the others comes late to the next meeting, and is on time again after it. Lateness at a
point is against the median of the other ranks; what is late by that much in three of four steps counts, so that the noise of a busy machine
does not. It is the place of the first late point after a meeting that tells where the time goes. Clocks are wall clocks: one on one host;
between hosts a constant offset is removed, and with it lateness that lasts the whole step.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

from hfopt.files import write_whole
from hfopt.monitor.fault_guard import Faults, harmless
from hfopt.monitor.log import CsvLog, RunLog, finite
from hfopt.monitor.metrics import metrics
from hfopt.monitor.step_clock import Stamp
from hfopt.schema import Finding, RankLag, Sample, Window

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
        write_whole(self.path, json.dumps(note))


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


LIVE = "live.json"
_POINTS = 120
_NOTE_EACH_S = 10.0


class Journal:
    def __init__(self, path: Path, *, rank: int, world_size: int, csv: bool, max_bytes: int, faults: Faults) -> None:
        self.faults, self.path, self.rank = faults, path, rank
        self._log = RunLog(path, max_bytes=max_bytes)
        self._csv = CsvLog(path.with_suffix(".csv")) if csv else None
        self._note = RankFile(path.parent, rank) if world_size > 1 else None
        self._noted_s = float("-inf")
        self._points: deque[str] = deque(maxlen=_POINTS)  # as JSON already: each is written a hundred times
        self.state: dict[str, Any] = {"pid": os.getpid(), "step": 0, "max_steps": 0, "findings": [], "ended": False}

    @harmless("the log file")
    def write(self, kind: str, **fields: Any) -> None:
        self._log.write(kind, **fields)

    def window(self, window: Window, **extra: Any) -> dict[str, float]:
        """Returns the metrics it wrote."""
        figures = finite(metrics(window))
        self.write("window", first_step=window.first_step, last_step=window.last_step, **extra, metrics=figures, window=window)
        self._row(window, figures)
        return figures

    def finding(self, finding: Finding, step: int) -> None:
        self.write("finding", step=step, **asdict(finding))

    @harmless("the CSV file")
    def _row(self, window: Window, figures: Mapping[str, float]) -> None:
        if self._csv is not None:
            from hfopt.monitor.metrics import KEYS, PREFIX

            times = {"time": round(time.time(), 3), "first_step": window.first_step, "last_step": window.last_step}
            self._csv.write({**times, **{name: figures.get(PREFIX + name) for name in KEYS}})

    @harmless("the live view")
    def live(self, sample: Sample | None, line: str, data_wait: float | None) -> None:
        """The file `hfopt watch` reads: replaced as a whole, so a reader never sees half of it."""
        if sample is not None:
            self._points.append(json.dumps(point(sample, data_wait)))
        head = json.dumps({"time": time.time(), **self.state, "status": line})
        target = self.path.with_name(LIVE if self.rank == 0 else f"live.rank{self.rank}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, f'{head[:-1]}, "points": [{", ".join(self._points)}]}}')

    @harmless("the note for the first rank")
    def note(self, stamps: Sequence[Stamp], figures: Mapping[str, float], *, ended: bool = False) -> None:
        now_s = time.monotonic()
        if self._note is not None and (ended or now_s - self._noted_s >= _NOTE_EACH_S):
            self._noted_s = now_s
            self._note.write(stamps=stamps, summary=figures, ended=ended)

    @harmless("the log file")
    def close(self) -> None:
        self._log.close()


def point(sample: Sample, data_wait: float | None) -> dict[str, float | None]:
    """What the curves of `hfopt watch` are drawn from; shares, of the first card."""
    card = sample.gpus[0] if sample.gpus else None
    return {
        "gpu": card.sm_util if card else None,
        "vram": _share(card.used_bytes, card.total_bytes) if card else None,
        "cpu": sample.cpu_util,
        "ram": _share(sample.ram_used_bytes, sample.ram_total_bytes),
        "data_wait": data_wait,
        "core_wait": sample.core_wait,
    }


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None
