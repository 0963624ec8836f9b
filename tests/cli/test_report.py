"""hfopt report and hfopt watch, as a user calls them."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner
from watched import window

from hfopt.cli import application, watch
from hfopt.errors import HfoptError, LogError
from hfopt.monitor import screen
from hfopt.monitor.log import RunLog

runner, app = CliRunner(), application([])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with closing(RunLog(tmp_path / "hfopt" / "monitor.jsonl")) as log:
        log.write("header", model="BertModel", device="cuda", max_steps=101, config={})
        log.write("window", window=window())
    return tmp_path


def live(folder: Path, **changed: object) -> None:
    points = [{"gpu": share, "vram": 0.5, "cpu": 0.25, "ram": None, "data_wait": 0.03} for share in (0.0, 0.5, 1.0)]
    content = {"time": time.time(), "pid": os.getpid(), "step": 5, "max_steps": 10, "status": "GPU: 85%", "points": points, "ended": False}
    (folder / "hfopt").mkdir(exist_ok=True)
    (folder / "hfopt" / "live.json").write_text(json.dumps({**content, "findings": ["input_bound: slow"], **changed}))


def test_report_as_text_and_json(run_dir: Path) -> None:
    text = runner.invoke(app, ["report", str(run_dir)])
    assert text.exit_code == 0 and "forward+backward" in text.stdout
    facts = json.loads(runner.invoke(app, ["report", str(run_dir), "--json"]).stdout)
    assert facts["metrics"]["hfopt/gpu_util"] == pytest.approx(97) and facts["finished"] is False and facts["steps"] == 100


def test_report_of_two_runs_as_json(run_dir: Path) -> None:
    facts = json.loads(runner.invoke(app, ["report", str(run_dir), str(run_dir), "--json"]).stdout)
    assert facts["change"]["hfopt/samples_per_s"] == 0 and facts["before"] == facts["after"]


def test_report_as_a_page(run_dir: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.html", tmp_path / "two.html"
    assert "forward+backward" in runner.invoke(app, ["report", str(run_dir), "--html", str(one)]).stdout
    assert runner.invoke(app, ["report", str(run_dir), str(run_dir), "--html", str(two)]).exit_code == 0
    assert "BertModel on cuda" in one.read_text() and "Before and after" in two.read_text()
    assert isinstance(runner.invoke(app, ["report", str(run_dir), "--html", str(tmp_path / "no" / "x.html")]).exception, HfoptError)
    shown = runner.invoke(app, ["report", str(run_dir), "--html", "-"]).stdout
    assert shown.startswith("<!doctype html>") and shown.endswith("</html>")


def test_report_of_nothing_is_an_error_with_a_hint(tmp_path: Path) -> None:
    result = runner.invoke(app, ["report", str(tmp_path / "no")])
    assert isinstance(result.exception, LogError) and result.exception.hint


def test_watch_shows_curves_and_findings(tmp_path: Path) -> None:
    live(tmp_path)
    shown = runner.invoke(app, ["watch", str(tmp_path), "--once"]).stdout
    assert "step 5 of 10 (50 %)" in shown and "GPU: 85%" in shown and "▁▄█" in shown and "! input_bound: slow" in shown
    assert "\nRAM" not in shown


def test_watch_tells_a_run_that_is_gone(tmp_path: Path) -> None:
    live(tmp_path, pid=2**22 + 1, time=time.time() - 60)
    assert "gone" in runner.invoke(app, ["watch", str(tmp_path), "--once"]).stdout
    live(tmp_path, ended=True)
    assert "ended" in runner.invoke(app, ["watch", str(tmp_path), "--once"]).stdout


def test_watch_finds_the_newest_run_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, step in (("old", 1), ("new", 7)):
        (tmp_path / name).mkdir()
        live(tmp_path / name, step=step)
        os.utime(tmp_path / name / "hfopt" / "live.json", (step, step))
    monkeypatch.chdir(tmp_path)
    assert "step 7 of 10" in runner.invoke(app, ["watch", "--once"]).stdout


def test_watch_of_any_process() -> None:
    shown = runner.invoke(app, ["watch", "--pid", str(os.getpid()), "--once", "--interval", "0.1"]).stdout
    assert f"process {os.getpid()}" in shown and "CPU: " in shown and "RAM: " in shown
    assert isinstance(runner.invoke(app, ["watch", "--pid", str(2**22 + 1)]).exception, LogError)


def test_watch_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = iter((6, 7, 8))

    def meanwhile(seconds: float) -> None:
        live(tmp_path, step=(step := next(steps)), ended=step == 8)

    live(tmp_path)
    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=meanwhile))
    watch._show(lambda: screen.read_live(tmp_path / "hfopt" / "live.json"), "out", 0.2)
    assert next(steps, None) is None
    assert "step 8 of 10" in capsys.readouterr().err
