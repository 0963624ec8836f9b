"""Replays that were made before, known by what is replayed: every event with its size, and the allocator's options.

A replay is a pure function of the events, so its answer is found by a digest of them, whichever card, batch or trace they came from: cards
whose kernels take the same sizes share it, and so does the next question about the same job, from the disk (`store`). A digest takes a
millisecond, a replay twenty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hfopt.store import Store, default_store

MOST_KEPT = 4096  # of one model, the newest: some hundred bytes each


@dataclass(frozen=True, slots=True)
class Replay:
    allocated_bytes: int
    reserved_bytes: int
    peak_event: int
    fits: bool = True


class KeptReplays:
    """By digest; `save` writes what is new."""

    def __init__(self, store: Store | None, workload: str) -> None:
        self._store, self._parts = store, {"what": "replays", "workload": workload}
        self._known = _read(None if store is None else store.get(self._parts))
        self._new = False

    @property
    def workload(self) -> str:
        return self._parts["workload"]

    def answer(self, digest: str, replay: Callable[[], Replay]) -> Replay:
        if digest not in self._known:
            self._known[digest] = replay()
            self._new = True
        return self._known[digest]

    def save(self, label: str) -> None:
        if self._store is None or not self._new:
            return
        newest = list(self._known.items())[-MOST_KEPT:]
        rows = [[digest, one.allocated_bytes, one.reserved_bytes, one.peak_event, one.fits] for digest, one in newest]
        self._store.put(self._parts, rows, label=label)
        self._new = False


_kept: ContextVar[KeptReplays | None] = ContextVar("kept", default=None)


@contextmanager
def replays_kept(workload: str | None, label: str) -> Iterator[None]:
    """In here a replay that is known is not made again, and what is new is kept, however it ends. None: a model that may not be kept."""
    known = _kept.get()
    if workload is None or (known is not None and known.workload == workload):
        yield
        return
    kept = KeptReplays(default_store(), workload)
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        kept.save(label)


def known_or_made(described: Callable[[], Iterator[bytes]], replay: Callable[[], Replay]) -> Replay:
    """`described` is all that the replay depends on; it is asked only where replays are kept."""
    kept = _kept.get()
    if kept is None:
        return replay()
    digest = hashlib.sha256()
    for part in described():
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return kept.answer(digest.hexdigest(), replay)


def _read(rows: Any) -> dict[str, Replay]:
    """What is not as `save` writes it is left out: it costs a replay."""
    found = {}
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, list) and [type(item) for item in row] == [str, int, int, int, bool]:
            found[row[0]] = Replay(*row[1:])
    return found
