"""The log: whole lines at any moment, bounded size, readable after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hfopt.monitor.log import CsvLog, RunLog, read, rotated
from hfopt.schema import Spread

Opened = Callable[[RunLog], RunLog]


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Logs that are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda log: stack.enter_context(closing(log))


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path, opened: Opened) -> None:
    log = opened(RunLog(tmp_path / "deep" / "monitor.jsonl"))
    log.write("header", config={"a": 1})
    log.write("window", util=Spread(mean=0.5, low=0.1, high=0.9), path=Path("x"), names={"b", "a"})
    first, second = (json.loads(line) for line in (tmp_path / "deep" / "monitor.jsonl").read_text().splitlines())
    assert first["kind"] == "header" and first["config"] == {"a": 1} and first["time"] > 1e9
    assert second["util"] == {"mean": 0.5, "low": 0.1, "high": 0.9} and second["path"] == "x" and second["names"] == ["a", "b"]


def test_a_killed_process_leaves_its_lines(tmp_path: Path) -> None:
    code = "import os, signal; from pathlib import Path; from hfopt.monitor.log import RunLog\n"
    code += f"log = RunLog(Path({str(tmp_path / 'm.jsonl')!r}))\n"
    code += "for n in range(50): log.write('window', n=n)\nos.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    assert [line["n"] for line in read(tmp_path / "m.jsonl")] == list(range(50))


def test_a_torn_line_is_left_out_and_does_not_spoil_the_next_session(tmp_path: Path, opened: Opened) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"kind": "header"}\n{"kind": "win')
    opened(RunLog(path)).write("header", n=2)
    assert [line["kind"] for line in read(path)] == ["header", "header"]


def test_rotation_bounds_the_size_and_each_file_starts_with_the_header(tmp_path: Path, opened: Opened) -> None:
    path, limit = tmp_path / "m.jsonl", 4000
    log = opened(RunLog(path, max_bytes=limit, keep=2))
    log.write("header", config="c" * 100)
    for n in range(1000):
        log.write("window", n=n, text="x" * 50)
    files = sorted(tmp_path.iterdir())
    assert files == [path, rotated(path, 1), rotated(path, 2)]
    assert all(file.stat().st_size <= limit for file in files)
    assert all(json.loads(file.read_text().splitlines()[0])["kind"] == "header" for file in files)
    numbers = [line["n"] for line in read(path) if line["kind"] == "window"]
    assert numbers == list(range(numbers[0], 1000)) and len(numbers) > 50


def test_a_value_json_has_no_sign_for_is_refused_rather_than_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        RunLog(tmp_path / "m.jsonl").write("window", loss=float("nan"))


def test_the_table_has_one_head_and_one_row_per_window(tmp_path: Path) -> None:
    for value in (1.5, None):
        CsvLog(tmp_path / "m.csv").write({"step": 1, "util": value})
    assert (tmp_path / "m.csv").read_text().splitlines() == ["step,util", "1,1.5", "1,"]
