"""The clock that a timed rehearsal shows the script: `time` and CUDA events say what they would say on the card.

Until training begins it runs with the real one. Then the steps alone move it, each by what `hfopt.probe.rehearsed_time` predicts; for that
the launches of a step must have been seen, so the steps before stand still and are made up for. Evaluation and saving, for which nothing is
predicted, take no time on it. csrc/clock.c keeps it; here `time` reads it, and hfopt is asked for the times of a step (`WANTED`, `ANSWER`:
files in the rehearsal's folder). Known limit: `datetime.now()` and other processes read the real one.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "HFOPT_VIRTUAL_JOURNAL"
WANTED, ANSWER = "clock-wanted-{}", "clock-{}.json"
_PATIENCE_S, _POLL_S = 60.0, 0.02
_SEEN = 3  # steps after which one with operations and one with the host's time are over
_real_ns, _real_time_ns, _real_sleep = time.monotonic_ns, time.time_ns, time.sleep


class RehearsedClock:
    """Of this process."""

    def __init__(self) -> None:
        self._library = ctypes.PyDLL(None)
        self._library.hfopt_clock_ns.restype = ctypes.c_longlong
        self._library.hfopt_clock_steps.argtypes = [ctypes.c_longlong]
        self._library.hfopt_clock_sleep.argtypes = [ctypes.c_longlong]
        self.known = False
        self._held = False
        self._before = 0  # steps that were done when it was held

    def show(self) -> None:
        """To all who ask `time` from now on."""
        read = self._library.hfopt_clock_ns

        def sleep(seconds: Any) -> None:
            _real_sleep(seconds)
            self._library.hfopt_clock_sleep(int(float(seconds) * 1e9))

        time.monotonic_ns = time.perf_counter_ns = lambda: read()
        time.monotonic = time.perf_counter = lambda: read() * 1e-9
        time.time_ns = lambda: _real_time_ns() + read() - _real_ns()
        time.time = lambda: (_real_time_ns() + read() - _real_ns()) * 1e-9
        time.sleep = sleep
        os.register_at_fork(after_in_child=self._library.hfopt_clock_forked)

    def hold(self, steps_done: int) -> None:
        if not self._held:
            self._held, self._before = True, steps_done
            self._library.hfopt_clock_hold()

    def step_done(self, steps: int) -> None:
        """The journal has noted that the step is over."""
        if not self._held:
            self.hold(steps)
        elif self.known:
            self._library.hfopt_clock_steps(1)
        elif steps >= _SEEN and self._follow(self._ask()):
            self._library.hfopt_clock_steps(steps - self._before)

    def train_ended(self, steps: int, all_steps: int) -> None:
        """After so many of the training's steps: it shows the end of them all."""
        if self.known:
            self._library.hfopt_clock_steps(all_steps - steps)
        else:
            self.let_go()

    def let_go(self) -> None:
        """Nothing is known of the steps: as if it had always run with the real one."""
        if self._held:
            self._held = False
            self._library.hfopt_clock_run(1)

    def _ask(self) -> Any:
        folder, pid = Path(os.environ[FOLDER]), os.getpid()
        answer, ends_ns = folder / ANSWER.format(pid), _real_ns() + int(_PATIENCE_S * 1e9)
        (folder / WANTED.format(pid)).touch()
        while not answer.exists():
            if _real_ns() > ends_ns:
                return None
            _real_sleep(_POLL_S)
        import json

        return json.loads(answer.read_text())

    def _follow(self, found: Any) -> bool:
        if not found:
            self.let_go()
            return False
        starts, times = found["starts"], found["times_ns"]
        numbers = (ctypes.c_longlong * len(times))(*times)
        self._library.hfopt_clock_follow(
            len(starts) - 1, (ctypes.c_int * len(starts))(*starts), numbers, ctypes.c_longlong(found["step_ns"])
        )
        self.known = True
        return True


clock = RehearsedClock() if FOLDER in os.environ and hasattr(ctypes.PyDLL(None), "hfopt_clock_ns") else None
