"""The run's diary: JSON Lines, flushed, bounded by rotation, readable after a kill; and what a line must hold to be believed.

A line is checked against types, the dataclasses of hfopt/schema among them; what is unknown is passed over, what is wrong is a TypeError
that names its place. Numbers are finite and of a size a run can have, so that no arithmetic on them can fail.

A line is {"kind": ..., "time": seconds since 1970, ...}. Kinds: header (settings, card, versions), window (one per logging step), epoch,
finding, resolved, warning, fallback, receipt, summary, interrupted. A new train() appends a new header, so a file holds one or more
sessions. When the file grows over the limit it is renamed to `<name>.1` (the older ones move up, the oldest goes) and the new file begins
with the header again.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from hfopt.schema import Change

_MOST = 1e18  # bytes, seconds, tokens: no figure of a run is larger

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


NAME = "monitor.jsonl"


class RunLog:
    """Appends lines to a JSON Lines file. Raises OSError; who must not fail (the monitor) wraps the call."""

    def __init__(self, path: Path, *, max_bytes: int = 16 << 20, keep: int = 3) -> None:
        self.path = path
        self._max_bytes, self._keep = max_bytes, keep
        self._stream: FileIO | None = None
        self._header: bytes | None = None
        self._size = 0

    def write(self, kind: str, **fields: Any) -> None:
        entry = {"kind": kind, "time": round(time.time(), 3), **fields}
        line = json.dumps(entry, default=plain, allow_nan=False).encode() + b"\n"
        if kind == "header":
            self._header = line
        if self._stream is None:
            self._open()
        elif self._size + len(line) > self._max_bytes:
            self._rotate()
            if kind != "header" and self._header is not None:
                self._put(self._header)
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
        for number in range(self._keep, 0, -1):
            source = self.path if number == 1 else rotated(self.path, number - 1)
            if source.exists():
                source.replace(rotated(self.path, number))
        self._open()


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
    """The windows as a table: one row each, the columns of the first row."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, row: Mapping[str, Any]) -> None:
        new = not self.path.exists() or self.path.stat().st_size == 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream)
            if new:
                writer.writerow(row)
            writer.writerow(["" if value is None else value for value in row.values()])
