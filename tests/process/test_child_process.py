"""A child that hangs, forks, is killed or loses its parent leaves no process and no temporary file."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfopt.errors import DryRunError
from hfopt.process import child_guard, child_process
from hfopt.process.child_guard import marked_processes

FORKS_AND_HANGS = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.fork()
open(sys.argv[1], "a").write("up\\n")
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_tempdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def _processes_mentioning(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes() or word.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def _gone(word: str, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not _processes_mentioning(word):
            return True
        time.sleep(0.02)
    return False


def test_exit_codes_and_signals_are_told() -> None:
    with child_process.scratch_folder() as folder:
        ended = child_process.run([sys.executable, "-S", "-c", "raise SystemExit(7)"], folder=folder, timeout_s=30, env=os.environ)
        assert (ended.reason, ended.returncode) == ("exit", 7)
        kills_itself = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
        ended = child_process.run([sys.executable, "-S", "-c", kills_itself], folder=folder, timeout_s=30, env=os.environ)
        assert (ended.reason, ended.returncode) == ("exit", -signal.SIGTERM)


def test_a_child_is_ended_while_a_fork_of_this_process_holds_its_pipe_too() -> None:
    """As the one that traces ahead does: then there is no end of file, and a plan that failed would wait for ever."""
    with child_process.scratch_folder() as folder:
        running = child_process.start(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], folder=folder, timeout_s=60, env=os.environ
        )
        assert running._process.stdin is not None
        held = os.dup(running._process.stdin.fileno())
        began = time.monotonic()
        try:
            running.end()
            running.end()
        finally:
            os.close(held)
        assert time.monotonic() - began < 30


def test_a_child_that_has_told_is_not_waited_for_and_ended_all_the_same(tmp_path: Path) -> None:
    told, word = tmp_path / "told", f"tells-{random.getrandbits(64):x}"
    code = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(600)"
    with child_process.scratch_folder() as folder:
        running = child_process.start(
            [sys.executable, "-S", "-c", code, str(told), word], folder=folder, timeout_s=300, env=os.environ, output=subprocess.DEVNULL
        )
        assert running.wait(250, told.exists).reason == "exit" and told.exists() and _processes_mentioning(word)
        assert running.wait(0.05, lambda: False).reason == "timeout" and not _processes_mentioning(word)


def test_a_command_that_does_not_exist_is_said() -> None:
    with child_process.scratch_folder() as folder, pytest.raises(DryRunError, match="/nowhere/at/all"):
        child_process.run(["/nowhere/at/all"], folder=folder, timeout_s=30, env=os.environ)


def test_a_hanging_child_and_all_it_started_are_ended_at_the_limit(tmp_path: Path) -> None:
    word = f"up-{tmp_path.name}-{os.getpid()}"
    up = tmp_path / word
    for limit_s in (1.5, 6.0, 24.0):  # a slow machine needs more to bring both up
        up.unlink(missing_ok=True)
        with child_process.scratch_folder() as folder:
            command = [sys.executable, "-S", "-c", FORKS_AND_HANGS, str(up)]
            ended = child_process.run(command, folder=folder, timeout_s=limit_s, env=os.environ | {"WORD": word})
        assert ended.reason == "timeout"
        assert ended.wall_s >= limit_s
        assert _gone(word)
        if up.exists() and up.read_text() == "up\nup\n":
            return
    raise AssertionError("it never came up")


PARENT = """
import os, sys
from hfopt.process import child_process as child
with child.scratch_folder() as folder:
    sys.stdout.write("started\\n")
    sys.stdout.flush()
    child.run([sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]], folder=folder, timeout_s=600, env=os.environ)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killing_hfopt_at_any_moment_ends_the_child(number: signal.Signals, tmp_path: Path, own_tempdir: Path) -> None:
    word = f"up-{tmp_path.name}-{os.getpid()}"
    moments = random.Random(number)
    for _ in range(3):
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, FORKS_AND_HANGS, str(tmp_path / word)],
            env=os.environ | {"WORD": word},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        time.sleep(moments.uniform(0, 0.5))
        parent.send_signal(number)
        parent.wait(timeout=60)
        parent.stdout.close()
        assert _gone(word), number
        end = time.monotonic() + 60
        while list(own_tempdir.iterdir()) and time.monotonic() < end:
            time.sleep(0.02)
        if number == signal.SIGKILL:  # perhaps before its guard was up: then the next use sweeps
            with child_process.scratch_folder():
                pass
        assert list(own_tempdir.iterdir()) == []


def test_a_killed_guard_is_noticed_and_its_children_ended(tmp_path: Path) -> None:
    word = f"up-{tmp_path.name}-{os.getpid()}"
    killer = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", "{word}"], start_new_session=True)
os.kill(os.getppid(), 9)
time.sleep(600)
"""
    with child_process.scratch_folder() as folder:
        ended = child_process.run([sys.executable, "-S", "-c", killer], folder=folder, timeout_s=30, env=os.environ | {"WORD": word})
    assert ended.reason == "killed"
    assert _gone(word)


def test_marks_are_exact() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], env={"HFOPT_CHILD_MARK": "abcdef"})
    try:
        end = time.monotonic() + 60
        while process.pid not in marked_processes("abcdef") and time.monotonic() < end:
            time.sleep(0.01)
        assert marked_processes("abcdef") == [process.pid]
        assert marked_processes("abc") == []
    finally:
        process.kill()
        process.wait()


def test_a_folder_whose_owner_was_killed_is_swept(own_tempdir: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    here = child_process._where_numbers_count()
    (own_tempdir / f"hfopt-{dead.pid}-{here}-left").mkdir()
    kept = {f"hfopt-{os.getppid()}-{here}-alive", f"hfopt-{dead.pid}-01234567-on_another_machine"}
    for name in kept:
        (own_tempdir / name).mkdir()
    with child_process.scratch_folder() as folder:
        assert {path.name for path in own_tempdir.iterdir()} == {folder.name, *kept}
    for name in kept:
        (own_tempdir / name).rmdir()


def _guarded(folder: Path, mark: str, *command: str, limit_s: float = 60.0) -> subprocess.Popen[bytes]:
    """The guard alone, as `child` starts it."""
    folder.mkdir()
    return subprocess.Popen([sys.executable, child_guard.__file__, str(limit_s), str(folder), mark, *command], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("command", "limit_s", "written"),
    [
        ([sys.executable, "-S", "-c", "raise SystemExit(7)"], 60.0, {"reason": "exit", "returncode": 7}),
        ([sys.executable, "-S", "-c", "import time; time.sleep(600)"], 0.2, {"reason": "timeout", "returncode": -9}),
        (["/nowhere/at/all"], 60.0, {"reason": "exit", "returncode": 127, "error": "/nowhere/at/all: No such file or directory"}),
    ],
)
def test_the_guard_writes_how_it_went(command: list[str], limit_s: float, written: dict[str, object], tmp_path: Path) -> None:
    with _guarded(tmp_path / "folder", str(tmp_path), *command, limit_s=limit_s) as process:
        assert process.wait(timeout=60) == 0
    assert json.loads((tmp_path / "folder" / "ended.json").read_text()) == written
    assert marked_processes(str(tmp_path)) == []


def test_a_guard_whose_pipe_is_closed_ends_the_child_and_takes_the_folder_away(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with _guarded(tmp_path / "folder", str(tmp_path), sys.executable, "-S", "-c", FORKS_AND_HANGS, str(up)) as process:
        until = time.monotonic() + 60
        while not (up.exists() and up.read_text() == "up\nup\n") and time.monotonic() < until:
            time.sleep(0.01)
        assert len(marked_processes(str(tmp_path))) == 3
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    assert marked_processes(str(tmp_path)) == []
    assert not (tmp_path / "folder").exists()
