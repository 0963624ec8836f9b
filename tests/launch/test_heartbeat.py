"""A rank that hangs is named with where it stands; one that works is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfopt.launch.heartbeat import HangWatch, Heart, innermost

ROOT = Path(__file__).parents[2]
STUCK = """
import sys, threading
from pathlib import Path
from hfopt.launch.heartbeat import Heart
def never_returns():
    print("ready", flush=True)
    threading.Event().wait()
Heart(Path(sys.argv[1]), rank=3, after_s=0.2)
never_returns()
"""


def started(folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(folder)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_process_that_hangs_is_named_once_with_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without py-spy
    process = started(tmp_path)
    try:
        watch = HangWatch(folder=tmp_path, after_s=0.2)
        stack = tmp_path / f"stack-3-{process.pid}"
        while not stack.read_text().rstrip().endswith("<module>"):
            time.sleep(0.01)
        while (hang := watch.look()) is None:
            time.sleep(0.01)
        assert (hang.rank, hang.pid) == (3, process.pid)
        assert str(hang).startswith(f"rank 3 (process {process.pid}) has made no step for 0.2 s; it is in <string>, line ")
        assert "never_returns" in str(hang)
        assert watch.look() is None and watch.found == [hang]
    finally:
        process.kill()
        process.communicate()


def test_a_stopped_process_is_named_though_it_cannot_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    process = started(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        (tmp_path / f"stack-3-{process.pid}").write_text("")
        watch = HangWatch(folder=tmp_path, after_s=0.2)
        while (hang := watch.look()) is None:
            time.sleep(0.01)
        assert "does not answer (stopped, or held in the kernel)" in str(hang)
    finally:
        process.kill()
        process.communicate()


def test_who_works_or_has_ended_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the supervisor's own clock: the system's may jump."""
    now = [1000.0]
    monkeypatch.setattr("hfopt.launch.heartbeat.time.monotonic", lambda: now[0])
    heart = Heart(tmp_path, rank=0, after_s=3600.0)
    watch = HangWatch(folder=tmp_path, after_s=3600.0)
    for _ in range(5):
        assert watch.look() is None
        now[0] += 3000.0
        heart.beat()
    heart.stop()
    now[0] += 9000.0
    assert watch.look() is None and list(tmp_path.glob("beat-*")) == []


def test_a_folder_that_went_away_stops_nothing(tmp_path: Path) -> None:
    heart = Heart(tmp_path / "gone", rank=0, after_s=10.0)
    heart.beat()
    heart.stop()
    assert HangWatch(folder=tmp_path / "gone", after_s=1.0).look() is None


def test_the_innermost_frame_is_that_of_the_main_thread() -> None:
    text = (
        'Timeout (0:00:01)!\nThread 0x1 (most recent call first):\n  File "/lib/sampler.py", line 3 in run\n\n'
        'Thread 0x2 (most recent call first):\n  File "/lib/threading.py", line 1 in wait\n  File "/opt/train.py", line 7 in collate\n'
    )
    assert innermost(text) == "/opt/train.py, line 7, in collate"
    assert innermost("") is None
