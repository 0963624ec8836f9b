"""A rank that stops making steps is noticed and named with its Python stack, which shows where it hangs.

Inside the process a callback touches a file at every sign of life and winds up faulthandler's own watchdog: a C thread that writes all
stacks to a file when nobody winds it up again, even while the interpreter's lock is held. Outside, the supervisor looks at the files by its
own clock, so that neither a jump of the system's time nor a stopped process deceives it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_BEAT = re.compile(r"^beat-(\d+)-(\d+)$")
_SHARE = 0.8  # of the time allowed, after which the process writes its stacks itself, before the supervisor looks for them
_PY_SPY_S = 20.0
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?: in (?P<name>.+))?$')
_WAITING = ("threading.py", "selectors.py", "socket.py", "queue.py", "connection.py")


class Heart:
    """The signs of life of one process. Never raises: a file that cannot be written is no reason to stop training."""

    def __init__(self, folder: Path, *, rank: int, after_s: float) -> None:
        self._after_s, self._every_s, self._last = after_s, min(1.0, after_s / 10), 0.0
        self._beat = folder / f"beat-{rank}-{os.getpid()}"
        self._stacks: IO[str] | None = None
        try:
            self._stacks = (folder / f"stack-{rank}-{os.getpid()}").open("w")
        except OSError:
            return
        self.beat()

    def beat(self) -> None:
        now = time.monotonic()
        if self._stacks is None or now - self._last < self._every_s:
            return
        self._last = now
        try:
            self._beat.write_text(str(now))
        except OSError:
            self._stacks = None
            return
        faulthandler.dump_traceback_later(_SHARE * self._after_s, file=self._stacks)

    def stop(self) -> None:
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            self._stacks = None
        self._beat.unlink(missing_ok=True)


def callback(heart: Heart) -> Any:
    """For the Trainer's callbacks: every event of a run that goes on is a sign of life."""
    from transformers import TrainerCallback

    def alive(self: Any, *args: Any, **more: Any) -> None:
        heart.beat()

    events = ("on_step_begin", "on_substep_end", "on_step_end", "on_prediction_step", "on_evaluate", "on_save", "on_log", "on_epoch_begin")
    kind: Any = type("SignsOfLife", (TrainerCallback,), dict.fromkeys(events, alive))
    return kind()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    rank: int
    pid: int
    after_s: float
    where: str | None  # 'train.py, line 12, in collate'
    stacks: str

    def __str__(self) -> str:
        where = f"; it is in {self.where}" if self.where else "; it does not answer (stopped, or held in the kernel)"
        return f"rank {self.rank} (process {self.pid}) has made no step for {self.after_s:g} s{where}"


@dataclass(slots=True)
class HangWatch:
    """The supervisor's side. Each process is named once."""

    folder: Path
    after_s: float
    found: list[Hang] = field(default_factory=list)
    _seen: dict[str, tuple[str, float]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def look(self) -> Hang | None:
        """One that was not named before, if there is one."""
        now = time.monotonic()
        for path in sorted(self.folder.glob("beat-*")):
            match = _BEAT.match(path.name)
            try:
                beat = path.read_text()
            except OSError:  # it ended just now
                continue
            if match is None or path.name in self._named:
                continue
            if self._seen.get(path.name, ("", 0.0))[0] != beat:
                self._seen[path.name] = (beat, now)
            elif now - self._seen[path.name][1] >= self.after_s:
                self._named.add(path.name)
                hang = self._hang(int(match[1]), int(match[2]))
                self.found.append(hang)
                return hang
        return None

    def _hang(self, rank: int, pid: int) -> Hang:
        path = self.folder / f"stack-{rank}-{pid}"
        stacks = _py_spy(pid) or (path.read_text(errors="replace") if path.exists() else "")
        return Hang(rank=rank, pid=pid, after_s=self.after_s, where=innermost(stacks), stacks=stacks)


def innermost(stacks: str) -> str | None:
    """Where the main thread stands by faulthandler's text: it comes last, its newest frame first. Frames that only wait are passed over."""
    frames = [match for line in stacks.rpartition("Thread 0x")[2].splitlines() if (match := _FRAME.match(line))]
    own = next((frame for frame in frames if Path(frame["file"]).name not in _WAITING), None)
    shown = own or (frames[0] if frames else None)
    return None if shown is None else f"{shown['file']}, line {shown['line']}" + (f", in {shown['name']}" if shown["name"] else "")


def _py_spy(pid: int) -> str | None:
    """Stacks with the C frames' callers, where py-spy is installed and may look."""
    program = shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_PY_SPY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return re.sub(r"^    (\S+) \((\S+):(\d+)\)$", r'  File "\2", line \3 in \1', done.stdout, flags=re.MULTILINE)
