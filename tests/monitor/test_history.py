"""A log read back gives the run: finished, killed, resumed, rotated."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from watched import facts, window

from hfopt.errors import LogError
from hfopt.monitor import history, run_text
from hfopt.monitor.diagnose import diagnose
from hfopt.monitor.log import RunLog


def write(folder: Path, *, sessions: int = 1, ended: bool = True, max_bytes: int = 1 << 20, wait_s: float = 40.0) -> Path:
    ill = window(times={"data_wait_s": wait_s})
    with closing(RunLog(folder / "hfopt" / "monitor.jsonl", max_bytes=max_bytes)) as log:
        for number in range(sessions):
            log.write(
                "header", model="BertModel", device="cuda", max_steps=101, config={"bf16": bool(number), "seed": number}, first_step=0
            )
            log.write("window", first_step=2, last_step=101, window=ill)
            for finding in diagnose(ill, facts()):
                log.write("finding", step=101, **asdict(finding))
            if ended:
                log.write("summary", step=101, off={})
    return folder


def test_a_window_survives_the_way_to_disk_and_back(tmp_path: Path) -> None:
    assert history.load(write(tmp_path)).total == window(times={"data_wait_s": 40.0})


def test_a_killed_run_is_told_from_a_finished_one(tmp_path: Path) -> None:
    killed, finished = history.load(write(tmp_path / "a", ended=False)), history.load(write(tmp_path / "b"))
    assert not killed.finished and finished.finished
    assert "killed" in run_text.report(killed) and "finished at step 101" in run_text.report(finished)
    assert killed.figures == finished.figures


def test_the_last_session_counts(tmp_path: Path) -> None:
    found = history.load(write(tmp_path, sessions=3))
    assert found.earlier_sessions == 2 and found.header["config"]["seed"] == 2 and found.total is not None and found.total.steps == 100


def test_a_rotated_log_is_one_session(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "monitor.jsonl", max_bytes=2500, keep=5)) as log:
        log.write("header", model="M", max_steps=9)
        for _ in range(4):
            log.write("window", window=window())
    assert (tmp_path / "monitor.jsonl.1").exists()
    found = history.load(tmp_path)
    assert found.earlier_sessions == 0 and found.total is not None and found.total.steps == 400


def test_the_report_names_cause_and_remedy(tmp_path: Path) -> None:
    text = run_text.report(history.load(write(tmp_path)))
    assert "input_bound" in text and "dataloader_num_workers=4" in text and "data wait" in text


def test_two_runs_are_compared(tmp_path: Path) -> None:
    before, after = history.load(write(tmp_path / "a")), history.load(write(tmp_path / "b", sessions=2, wait_s=1.0))
    text = run_text.compare(before, after)
    assert "bf16: False -> True" in text and "better" in text
    assert run_text.changes(before, after)["hfopt/samples_per_s"] == pytest.approx(99.0 / 60.0 - 1, abs=0.01)
    assert "found before: input_bound" in text


def test_what_is_no_log_is_said_plainly(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(LogError) as caught:
            history.load(path)
        assert caught.value.hint
    (tmp_path / "monitor.jsonl").write_text("not json\n")
    with pytest.raises(LogError, match="no header"):
        history.load(tmp_path)


def test_a_run_without_a_window_is_reported(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "monitor.jsonl")) as log:
        log.write("header", model="M", max_steps=9)
    assert "before its first logging step" in run_text.report(history.load(tmp_path))
