"""Starts child processes: a command in the foreground that gets our signals, and children that may hang or fork.

The command is started by a guard (child_guard.py) that ends it at the time limit and when this process dies, however it dies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Literal

from hfopt.errors import DryRunError
from hfopt.process import child_guard
from hfopt.process.child_guard import adopt_orphans, shell_code

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_THE_TERMINAL = {"SIGINT", "SIGQUIT"}
_ENDS = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
_POLL_S = 1.0
_LOOK_S = 0.01


class Child:
    """At a terminal the child shares our process group, so that the terminal's keys reach it; otherwise it leads its own. A signal that was
    ignored when this process began (`nohup`) stays ignored in both. `early`: signals that came before there was a child (`noted_ends`)."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], early: list[int] | None = None) -> None:
        self._command, self._env = command, dict(env)
        self._shares_terminal = sys.stdin is not None and sys.stdin.isatty()
        self.asked_to_end = False
        self._process: subprocess.Popen[bytes] | None = None
        self._early = early if early is not None else []

    def run(self, should_end: Callable[[], bool], *, grace_s: float) -> int:
        """The exit code, as a shell counts it. Ends everything once `should_end` has been true for the time of grace."""
        waited_s, ended = 0.0, False
        with self._signals_passed_on():
            process = self._start()
            while True:
                try:
                    code = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    waited_s = waited_s + _POLL_S if should_end() else 0.0
                    if waited_s >= grace_s:
                        end_descendants(grace_s)
                        ended = True
        if code != 0:  # what a good end leaves running (a tracker's upload, a daemon) the command left on purpose
            end_descendants(grace_s)
        if ended:  # whoever waited for it first took its exit code along
            return shell_code(-signal.SIGTERM)
        return shell_code(code)

    def _start(self) -> subprocess.Popen[bytes]:
        """What was signalled before it could be passed on is passed on now."""
        adopt_orphans()
        self._process = subprocess.Popen(self._command, env=self._env, preexec_fn=None if self._shares_terminal else os.setpgrp)
        for number in self._early:
            self.asked_to_end = self.asked_to_end or number in _ENDS
            self._pass_on(self._process, number)
        return self._process

    def _pass_on(self, process: subprocess.Popen[bytes], number: int) -> None:
        if self._shares_terminal and signal.Signals(number).name in _FROM_THE_TERMINAL:
            return  # the terminal has sent it to the child too
        if process.poll() is None:
            (os.kill if self._shares_terminal else os.killpg)(process.pid, number)

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            self.asked_to_end = self.asked_to_end or number in _ENDS
            if self._process is None:
                self._early.append(number)
            else:
                self._pass_on(self._process, number)

        with _handled([getattr(signal, name) for name in _FORWARDED], pass_on):
            yield


@contextmanager
def noted_ends() -> Iterator[list[int]]:
    """While it is entered, a signal that asks for an end and finds no child to be passed on to is noted, and ends nothing by itself."""
    asked: list[int] = []
    with _handled(_ENDS, lambda number, frame: asked.append(number)):
        yield asked


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)


def end_descendants(grace_s: float) -> None:
    """Asks all that is left of the child to end, and insists after the time of grace."""
    import psutil

    left = psutil.Process().children(recursive=True)
    for process in left:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    for process in psutil.wait_procs(left, timeout=grace_s)[1]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


_STDERR = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How the command ended. A negative returncode is the signal that ended it."""

    reason: Literal["exit", "timeout", "killed"]
    returncode: int
    wall_s: float


def _where_numbers_count() -> str:
    """A word for the namespace that process numbers of this process are of: its machine since it was started, and its container."""
    words = [socket.gethostname()]
    with suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        words.append(str(Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("".join(words).encode()).hexdigest()[:8]


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder for one child; gone afterwards. Those of owners that were killed before their guard was up are swept: owners of
    this machine and container only, for several may share a temporary folder, and a process number means nothing in another."""
    here = _where_numbers_count()
    for old in Path(tempfile.gettempdir()).glob(f"hfopt-*-{here}-*"):
        owner = old.name.split("-")[1]
        if owner.isdigit() and not child_guard.is_alive(int(owner)):
            shutil.rmtree(old, ignore_errors=True)
    with _orderly_end():
        folder = Path(tempfile.mkdtemp(prefix=f"hfopt-{os.getpid()}-{here}-"))
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

    def wait(self, timeout_s: float | None = None, told: Callable[[], bool] | None = None) -> Ended:
        """Its end, or that it has told what it had to. At the limit it is ended, with all it started."""
        limit_s = None if timeout_s is None else time.monotonic() + timeout_s
        while told is None or not told():
            left_s = None if limit_s is None else limit_s - time.monotonic()
            try:
                self._process.wait(left_s if told is None else min(_LOOK_S, left_s or _LOOK_S))
            except subprocess.TimeoutExpired:
                if limit_s is None or time.monotonic() < limit_s:
                    continue
                self.end()
                return Ended(reason="timeout", returncode=-9, wall_s=time.monotonic() - self._started)
            return _how_it_ended(self._folder, self._mark, time.monotonic() - self._started)
        return Ended(reason="exit", returncode=0, wall_s=time.monotonic() - self._started)

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
        ending = json.loads((folder / "ended.json").read_text())
    except (OSError, ValueError):  # the guard itself was killed; its child died with it, but perhaps not the child's children
        child_guard.kill_marked(mark)
        return Ended(reason="killed", returncode=-9, wall_s=wall_s)
    if "error" in ending:
        raise DryRunError(f"cannot start {ending['error']}")
    return Ended(reason=ending["reason"], returncode=ending["returncode"], wall_s=wall_s)
