"""A command as one child and all it starts: signals and the exit code go through, and nothing is left running when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from hfopt.process.child_guard import adopt_orphans, shell_code

_FORWARDED = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_FROM_THE_TERMINAL = {"SIGINT", "SIGQUIT"}
_ENDS = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
_POLL_S = 1.0


class Child:
    """At a terminal the child shares our process group, so that the terminal's keys reach it; otherwise it leads its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = command, dict(env)
        self._shares_terminal = sys.stdin is not None and sys.stdin.isatty()
        self.asked_to_end = False
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

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
        end_descendants(grace_s)
        if ended:  # whoever waited for it first took its exit code along
            return shell_code(-signal.SIGTERM)
        return shell_code(code)

    def _start(self) -> subprocess.Popen[bytes]:
        """What was signalled before it could be passed on is passed on now."""
        adopt_orphans()
        self._process = subprocess.Popen(self._command, env=self._env, preexec_fn=None if self._shares_terminal else os.setpgrp)
        for number in self._early:
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

        before = {name: signal.signal(getattr(signal, name), pass_on) for name in _FORWARDED}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)


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
