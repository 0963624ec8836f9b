"""Stands between hfopt and a child it must not leave behind: ends it at the time limit, and when hfopt itself is gone.

Run as a script of its own (standard library only): `child_guard.py LIMIT_S FOLDER MARK COMMAND...`. Its standard input is a pipe whose
other end hfopt holds; end of file there means that hfopt died, a word that it wants the child ended. How it went is written to
FOLDER/ended.json. Every process the command started is found by MARK in its environment, because torchrun's workers have sessions of
their own. What every way of running a child needs stands here too, because this script can import nothing of ours.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK_VARIABLE = "HFOPT_CHILD_MARK"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_KILL_FOR_S = 5.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # hfopt hears them and closes the pipe


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def shell_code(returncode: int) -> int:
    """An exit code as a shell counts it: 128 and the number of the signal that ended the process."""
    return returncode if returncode >= 0 else 128 - returncode


def die_with_parent() -> None:
    """In a child: on Linux the kernel ends it when its parent ends, however that happens."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """A launcher that is killed leaves its ranks behind; on Linux they become our children and are ended with the rest."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _prctl(*arguments: int) -> None:
    import ctypes  # a plan that starts no child does without

    ctypes.CDLL(None).prctl(*arguments)


def marked_processes(mark: str) -> list[int]:
    """Who runs with this mark; zombies have no environment and do not count."""
    needle = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def kill_marked(mark: str, group: int | None = None) -> None:
    """Ends every process with the mark, again and again until none is left: one may fork while it is being looked for."""
    if group is not None:
        _signal_group(group)
    end = time.monotonic() + _KILL_FOR_S
    while (pids := marked_processes(mark)) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _signal_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _prepare_child() -> None:
    """In the child, before the command: signals as usual again, and it dies when the guard does."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()


def _wait(child: subprocess.Popen[bytes], limit_s: float) -> str:
    """'exit', 'timeout' or 'abandoned'."""
    wake, signalled = os.pipe()
    os.set_blocking(signalled, False)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    end = time.monotonic() + limit_s
    while True:
        if child.poll() is not None:
            return "exit"
        left_s = end - time.monotonic()
        if left_s <= 0:
            return "timeout"
        ready, _, _ = select.select([0, wake], [], [], left_s)
        if wake in ready:
            os.read(wake, 4096)
        if 0 in ready:
            return "exit" if child.poll() is not None else "abandoned"


def main(limit_s: float, folder: Path, mark: str, command: list[str]) -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    outcome: dict[str, object] = {"reason": "exit", "returncode": 127}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=os.environ | {MARK_VARIABLE: mark},
            start_new_session=True,
            preexec_fn=_prepare_child,
        )
    except OSError as error:
        outcome["error"] = f"{command[0]}: {error.strerror}"
    else:
        outcome["reason"] = _wait(child, limit_s)
        kill_marked(mark, child.pid)
        outcome["returncode"] = child.wait()
    if outcome["reason"] == "abandoned":
        shutil.rmtree(folder, ignore_errors=True)
    else:
        (folder / "ended.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
