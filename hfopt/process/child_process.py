"""Runs a command that may hang, fork or be killed, so that nothing of it is left: no process, no temporary file.

The command is started by a guard (child_guard.py) that ends it at the time limit and when this process dies, however it dies.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from hfopt.errors import DryRunError
from hfopt.process import child_guard

_STDERR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the command ended. A negative returncode is the signal that ended it."""

    reason: Literal["exit", "timeout", "killed"]
    returncode: int
    wall_s: float


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for one child; gone afterwards. Those of owners that were killed before their guard was up are swept."""
    for old in Path(tempfile.gettempdir()).glob("hfopt-*-*"):
        owner = old.name.split("-")[1]
        if owner.isdigit() and not child_guard.is_alive(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    with _orderly_end():
        folder = Path(tempfile.mkdtemp(prefix=f"hfopt-{os.getpid()}-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM unwinds the stack, as Ctrl-C does; where somebody else handles it, it stays theirs."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(child_guard.shell_code(-number))


class Running:
    """A command on its way."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, mark: str) -> None:
        self._process, self._folder, self._mark = process, folder, mark
        self._started = time.monotonic()

    def wait(self, timeout_s: float | None = None) -> Ended:
        """Its end; at the limit it is ended, with all it started."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            return Ended(reason="timeout", returncode=-9, wall_s=time.monotonic() - self._started)
        return _how_it_ended(self._folder, self._mark, time.monotonic() - self._started)

    def end(self) -> None:
        """Ends it if it still runs; may be called again. By a word: a fork that holds the pipe too keeps the end of file away."""
        pipe = self._process.stdin
        assert pipe is not None
        if not pipe.closed:
            with suppress(BrokenPipeError), pipe:
                pipe.write(b"end")
        self._process.wait()


def start(
    command: Sequence[str], *, folder: Path, timeout_s: float, env: Mapping[str, str], output: int | IO[bytes] | None = None
) -> Running:
    """Starts the command; `output` takes its stdout and stderr (None: both go to this process's stderr)."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", child_guard.__file__, str(timeout_s), str(folder), mark, *command],
        stdin=subprocess.PIPE,
        stdout=_STDERR if output is None else output,
        stderr=None if output is None else subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
    )
    return Running(process, folder, mark)


def run(command: Sequence[str], *, folder: Path, timeout_s: float, env: Mapping[str, str], output: int | IO[bytes] | None = None) -> Ended:
    """Runs the command to its end or to the limit."""
    running = start(command, folder=folder, timeout_s=timeout_s, env=env, output=output)
    try:
        return running.wait()
    finally:
        running.end()


def _how_it_ended(folder: Path, mark: str, wall_s: float) -> Ended:
    try:
        told = json.loads((folder / "ended.json").read_text())
    except (OSError, ValueError):  # the guard itself was killed; its child died with it, but perhaps not the child's children
        child_guard.kill_marked(mark)
        return Ended(reason="killed", returncode=-9, wall_s=wall_s)
    if "error" in told:
        raise DryRunError(f"cannot start {told['error']}")
    return Ended(reason=told["reason"], returncode=told["returncode"], wall_s=wall_s)
