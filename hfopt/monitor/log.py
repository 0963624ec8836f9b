"""The run's diary: JSON Lines, flushed, bounded by rotation, readable after a kill; and the checks a line passes when it is read back.

A line is checked against types, the dataclasses of hfopt/schema among them; what is unknown is passed over, what is wrong is a TypeError
that names its place. Numbers are finite and of a size a run can have, so that no arithmetic on them can fail.

A line is {"kind": ..., "time": seconds since 1970, ...}. Kinds: header (settings, card, versions), window (one per logging step), epoch,
finding, resolved, warning, fallback, receipt, summary, interrupted. A new train() appends a new header, so a file holds one or more
sessions. Within a session times go on from its first one by the monotonic clock: they are in order whatever the system's clock does.
When the file grows over the limit it is renamed to `<name>.1` (the older ones move up, the oldest goes) and the new file begins with the
header again. A disk that is full loses lines, not the log: each line is tried anew, and one that says how many are missing comes first.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from io import FileIO
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from hfopt.files import write_whole
from hfopt.monitor.fault_guard import Faults, retried_each_time, switched_off_on_error
from hfopt.monitor.metrics import metrics
from hfopt.monitor.step_clock import Stamp
from hfopt.schema import Change, Finding, MeetingGap, RankLag, Sample, Window

_MOST = 1e18  # bytes, seconds, tokens: no figure of a run is larger

Clock = Callable[[], float]
KINDS: Mapping[str, Mapping[str, Any]] = {
    "header": {
        "time": float,
        "model": str | None,
        "device": str,
        "gpus": tuple[Mapping[str, Any], ...],
        "versions": Mapping[str, str | None],
        "world_size": int,
        "max_steps": int | None,
        "first_step": int,
        "config": Mapping[str, Any],
    },
    "finding": {
        "step": int,
        "time": float,
        "cause": str,
        "confidence": float,
        "evidence": Mapping[str, Any],
        "message": str,
        "changes": tuple[Change, ...],
        "predicted_gain": float | None,
    },
    "resolved": {"step": int, "time": float, "cause": str},
    "fallback": {"time": float, "seen": Mapping[str, Any], "step": Mapping[str, Any]},
    "summary": {"time": float, "step": int, "off": Mapping[str, str]},
    "receipt": {
        "time": float,
        "planned_for": str,
        "predicted_step_s": float | None,
        "measured_step_s": float | None,
        "predicted_reserved_bytes": int | None,
        "measured_reserved_bytes": int | None,
        "why_not": str | None,
    },
    "window": {"time": float, "window": Mapping[str, Any]},
}
"""The fields of an entry that are read back; `time` is always there, the others may be missing."""


def check(entry: Mapping[str, Any]) -> None:
    """Raises TypeError or KeyError."""
    for name, kind in KINDS.get(entry["kind"], {"time": float}).items():
        if name in entry or name == "time":
            checked(entry[name], kind, f"{entry['kind']}.{name}")


def checked(value: Any, kind: Any, place: str) -> Any:
    """The value as its type has it: lists become tuples, objects dataclasses."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(value, inner, place)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        known, make = get_type_hints(kind), cast(Callable[..., Any], kind)
        return make(**{name: checked(one, known[name], f"{place}.{name}") for name, one in value.items() if name in known})
    if origin is tuple and isinstance(value, list):
        return tuple(checked(one, inner[0], place) for one in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: checked(one, inner[1], f"{place}.{name}") for name, one in value.items()}
    if kind in (int, float) and _is_number(value, kind):
        return value
    if (kind is bool and isinstance(value, bool)) or ((kind is str or origin is Literal) and isinstance(value, str)):
        return value
    raise TypeError(f"{place} is {str(value)[:40]!r}")


def _one_of(value: Any, kinds: tuple[Any, ...], place: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    other = [kind for kind in kinds if kind is not type(None)]
    assert len(other) == 1, f"{place}: only T | None is read back"
    return checked(value, other[0], place)


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not isinstance(value, int)):
        return False
    return math.isfinite(value) and abs(value) <= _MOST if isinstance(value, float) else abs(value) <= _MOST


NAME, LIVE, _LOG = "monitor.jsonl", "live.json", "the log file"
MOST_BYTES, KEPT = 16 << 20, 3  # of a file, and how many older ones stay beside it


class RunLog:
    """Appends lines to a JSON Lines file. Raises OSError; who must not fail (the monitor) wraps the call."""

    def __init__(self, path: Path, *, max_bytes: int = MOST_BYTES, keep: int = KEPT, now: Clock | None = None) -> None:
        self.path = path
        self._max_bytes, self._keep, self._now = max_bytes, keep, now
        self._stream: FileIO | None = None
        self._header: bytes | None = None
        self._headed = True  # the file has the header of this session
        self._size = 0

    def write(self, kind: str, **fields: Any) -> None:
        entry = {"kind": kind, "time": round((self._now or time.time)(), 3), **fields}
        line = json.dumps(entry, default=plain, allow_nan=False).encode() + b"\n"
        if kind == "header":
            self._header, self._headed = line, False
        if self._stream is None:
            self._open()
        elif self._size + len(line) > self._max_bytes:
            self._rotate()
            self._headed = self._header is None
        if not self._headed and self._header is not None:
            self._put(self._header)
            self._headed = True
        if kind != "header":
            self._put(line)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _put(self, line: bytes) -> None:
        """In one write, unbuffered: the system has the whole line or an error is raised."""
        assert self._stream is not None
        try:
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, "only a part of the line was written", str(self.path))
        except OSError:
            self.close()
            raise
        self._size += len(line)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = FileIO(self.path, "a")
        self._size = self._stream.tell()
        if self._size and not _ends_with_newline(self.path):
            self._put(b"\n")  # the last line of a killed run stays alone

    def _rotate(self) -> None:
        self.close()
        _move_up(self.path, self._keep)
        self._open()


def _move_up(path: Path, keep: int) -> None:
    for number in range(keep, 0, -1):
        source = path if number == 1 else rotated(path, number - 1)
        if source.exists():
            source.replace(rotated(path, number))


def rotated(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _ends_with_newline(path: Path) -> bool:
    if not path.is_file():
        return True  # a pipe or a device
    with path.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) == b"\n"


def plain(value: Any) -> Any:
    """What json does not know: our dataclasses become objects, paths and enums strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(getattr(value, "value", value))


def finite(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without the values JSON has no sign for."""
    return {name: value for name, value in fields.items() if not (isinstance(value, float) and not math.isfinite(value))}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of the log and its rotated parts, oldest first; a torn line (the kill came in the middle of it) is left out."""
    numbers = sorted((int(part.suffix[1:]) for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdigit()), reverse=True)
    for part in [*(rotated(path, number) for number in numbers), path]:
        if not part.exists():
            continue
        with part.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError):  # torn, or nested by who wants the reader to fail
                    continue
                if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
                    yield entry


class CsvLog:
    """The windows as a table: one row each, the columns of the first row; bounded as the log is."""

    def __init__(self, path: Path, *, max_bytes: int = MOST_BYTES) -> None:
        self.path, self._max_bytes = path, max_bytes

    def write(self, row: Mapping[str, Any]) -> None:
        size = self.path.stat().st_size if self.path.exists() else 0
        if size > self._max_bytes:
            _move_up(self.path, KEPT)
        new = not 0 < size <= self._max_bytes
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if new:
                writer.writerow(row)
            writer.writerow(["" if value is None else value for value in row.values()])


Stamps = Mapping[int, tuple[float, ...]]
_GAPS: tuple[MeetingGap, ...] = get_args(MeetingGap)
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
    where = next(place for place, value in zip(_GAPS, late, strict=True) if value >= 0.8 * worst or value == worst)
    return RankLag(rank=rank, lag_s=max(0.0, worst), step_s=step_s, where=where)


def _usually(values: list[float]) -> float:
    """What three of four reach."""
    return sorted(values)[len(values) // 4]


class RankFile:
    """One rank's note for the first rank: when it came where in its last steps, and what its card did."""

    def __init__(self, folder: Path, rank: int, now: Clock | None = None) -> None:
        self.path, self._now = folder / f"rank{rank}.json", now

    def write(self, *, stamps: Sequence[Stamp], summary: Mapping[str, Any], ended: bool) -> None:
        now, host = (self._now or time.time)(), socket.gethostname()
        note = {"time": now, "host": host, "stamps": list(stamps), "summary": summary, "ended": ended}
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


_POINTS = 120
_NOTE_EACH_S = 10.0


class Journal:
    def __init__(
        self, path: Path, *, rank: int, world_size: int, csv: bool, max_bytes: int, faults: Faults, now: Clock | None = None
    ) -> None:
        self.faults, self.path, self.rank, self._now = faults, path, rank, now
        self._log = RunLog(path, max_bytes=max_bytes, now=now)
        self._csv = CsvLog(path.with_suffix(".csv"), max_bytes=max_bytes) if csv else None
        self._note = RankFile(path.parent, rank, now) if world_size > 1 else None
        self._told_lost = 0
        self._noted_s = float("-inf")
        self._points: deque[str] = deque(maxlen=_POINTS)  # as JSON already: each is written a hundred times
        self.state: dict[str, Any] = {"pid": os.getpid(), "step": 0, "max_steps": 0, "findings": [], "ended": False}

    @retried_each_time(_LOG)
    def write(self, kind: str, **fields: Any) -> None:
        lost = self.faults.lost.get(_LOG, 0)
        if lost > self._told_lost:
            words = f"{lost - self._told_lost} lines before this one could not be written"
            self._log.write("warning", step=self.state["step"], message=words)
            self._told_lost = lost
        self._log.write(kind, **fields)

    def window(self, window: Window, **extra: Any) -> dict[str, float]:
        """Returns the metrics it wrote."""
        figures = finite(metrics(window))
        self.write("window", first_step=window.first_step, last_step=window.last_step, **extra, metrics=figures, window=window)
        self._row(window, figures)
        return figures

    def finding(self, finding: Finding, step: int) -> None:
        self.write("finding", step=step, **asdict(finding))

    @retried_each_time("the CSV file")
    def _row(self, window: Window, figures: Mapping[str, float]) -> None:
        if self._csv is not None:
            from hfopt.monitor.metrics import KEYS, PREFIX

            times = {"time": round((self._now or time.time)(), 3), "first_step": window.first_step, "last_step": window.last_step}
            self._csv.write({**times, **{name: figures.get(PREFIX + name) for name in KEYS}})

    @retried_each_time("the live view")
    def live(self, sample: Sample | None, line: str, data_wait: float | None) -> None:
        """The file `hfopt watch` reads: replaced as a whole, so a reader never sees half of it."""
        if sample is not None:
            self._points.append(json.dumps(point(sample, data_wait)))
        head = json.dumps({"time": time.time(), **self.state, "status": line})
        target = self.path.with_name(LIVE if self.rank == 0 else f"live.rank{self.rank}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, f'{head[:-1]}, "points": [{", ".join(self._points)}]}}')

    @retried_each_time("the note for the first rank")
    def note(self, stamps: Sequence[Stamp], figures: Mapping[str, float], *, ended: bool = False) -> None:
        now_s = time.monotonic()
        if self._note is not None and (ended or now_s - self._noted_s >= _NOTE_EACH_S):
            self._noted_s = now_s
            self._note.write(stamps=stamps, summary=figures, ended=ended)

    @switched_off_on_error(_LOG)
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
