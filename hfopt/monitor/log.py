"""The run's diary: JSON Lines, each line flushed, bounded by rotation, readable after a kill.

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
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

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
