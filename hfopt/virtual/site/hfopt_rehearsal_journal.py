"""The journal of a timed rehearsal: which steps are written down, what each operation costs, and where the phases begin.

The library notes launches, matrix products, copies, waits and collectives (csrc/journal.c); here each is given its operation. Steps take
turns after the first, which warms caches up: in one a dispatch mode asks hfopt's own cost model (`hfopt.trace.op_cost`) for each
operation, in the next nothing is added to the host's work, so that its time between launches can be taken.
`hfopt.virtual.launch_cost` reads the file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hfopt_rehearsal_clock import FOLDER as WANTED  # type: ignore[import-not-found]
from hfopt_rehearsal_clock import clock
from torch.utils._python_dispatch import TorchDispatchMode

_HFOPT = str(Path(__file__).parents[3])


def _borrowed() -> tuple[Any, Any]:
    """hfopt's own cost of an operation, and whether TF32 is on; the folder leaves the path again."""
    sys.path.append(_HFOPT)
    try:
        from hfopt.compat.torch_patches import tf32_is_on
        from hfopt.trace.op_cost import cost
    finally:
        sys.path.remove(_HFOPT)
    return cost, tf32_is_on


def _on_card(values: Any) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cuda:
                return True
        elif isinstance(value, (list, tuple)) and _on_card(value):
            return True
    return False


class _Operations(TorchDispatchMode):  # type: ignore[misc]
    """Writes the cost of each operation behind the launches it made."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._cost, _ = _borrowed()
        self._begin, self._end = library.hfopt_journal_operation, library.hfopt_journal_operation_end

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, (torch.nn.Parameter,)) and kind is not torch.Tensor for kind in types):
            return NotImplemented  # a subclass comes back here with the tensors inside of it
        self._begin()
        text = None
        try:
            out = func(*args, **kwargs)
            if _on_card(args) or _on_card((out,)):
                text = self._text(func, args, kwargs, out)
        finally:
            self._end(text)
        return out

    def _text(self, func: Any, args: Any, kwargs: Any, out: Any) -> bytes | None:
        priced = self._cost(func, args, kwargs, out)
        if priced is None:
            return None
        shape = ",".join(map(str, priced.shape or ()))
        name = func._overloadpacket.__name__
        fields = (name, priced.kind, priced.dtype, repr(priced.flops), repr(priced.moved_bytes), str(priced.launches), shape)
        return "\t".join(fields).encode()


class LaunchJournal:
    """Of this process. Nothing happens where no journal is wanted."""

    def __init__(self) -> None:
        self.wanted = clock is not None
        self.tell: Any = print
        if not self.wanted:
            return
        self._library = ctypes.PyDLL(None)
        self._library.hfopt_journal_note.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
        self._library.hfopt_journal_operation_end.argtypes = [ctypes.c_char_p]
        self._operations: Any = None
        self._entered = False

    def cannot_time(self, what: str) -> None:
        """Said before a step is done: compiled code is launched here, but not priced."""
        if self.wanted:
            self.end()
            self.wanted = False
            self.tell(f"{what}: the time of compiled code is not predicted")

    def note(self, kind: str, text: str) -> None:
        if self.wanted:
            self._library.hfopt_journal_note(kind.encode(), text.encode())

    def phase(self, name: str) -> None:
        self.note("phase", name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside is hfopt's work, not the script's."""
        if not self.wanted:
            yield
            return
        self._library.hfopt_journal_pause()
        try:
            yield
        finally:
            self._library.hfopt_journal_resume()

    def step_done(self, steps: int, then: str, **facts: Any) -> None:
        """After each optimizer step: the next is one with operations (2, 4, …) or with the host's own time (3, 5, …). `then`: its phase."""
        if not self.wanted:
            return
        if self._entered:
            self._operations.__exit__(None, None, None)
            self._entered = False
        facts["tf32"] = int(_borrowed()[1]())
        self._library.hfopt_journal_record(1)
        self.note("step", "\t".join([str(steps), *(f"{name}={value}" for name, value in facts.items())]))
        with self.aside():
            self._library.hfopt_journal_flush()
            clock.step_done(steps)
        self.phase(then)
        if steps % 2:
            self._operations = self._operations or _Operations(self._library)
            self._operations.__enter__()
            self._entered = True

    def train_begins(self) -> None:
        if self.wanted:
            clock.hold(0)

    def train_ends(self, steps: int, all_steps: int) -> bool:
        """Whether the script's clock showed what is predicted."""
        if self.wanted:
            clock.train_ended(steps, all_steps)
        return self.wanted and clock.known

    def end(self) -> None:
        if self.wanted:
            if self._entered:
                self._operations.__exit__(None, None, None)
                self._entered = False
            self._library.hfopt_journal_record(0)

    def follow_fetching(self) -> None:
        """What each batch costs the process that makes it: a worker, or the script itself."""
        if not self.wanted:
            return
        from torch.utils.data._utils import fetch

        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            fetcher = getattr(fetch, name)
            fetcher.fetch = _timed(fetcher.fetch, os.environ[WANTED])


def _timed(fetch: Any, folder: str) -> Any:
    @functools.wraps(fetch)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        batch = fetch(self, *args, **kwargs)
        with Path(folder, f"fetch-{os.getpid()}.txt").open("a") as stream:
            stream.write(f"{time.thread_time() - started}\n")
        return batch

    return timed


journal = LaunchJournal()
