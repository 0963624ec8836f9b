"""A log becomes what the page draws: windows on the run's clock, findings at the window they showed in."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from watched import facts, window

from hfopt.errors import LogError
from hfopt.monitor import history, run_text
from hfopt.monitor.diagnose import diagnose
from hfopt.monitor.log import RunLog
from hfopt.schema import RunView


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time the log writes."""
    now = [1_000_000.0]
    monkeypatch.setattr("hfopt.monitor.log.time.time", lambda: now[0])
    return now


def view(folder: Path, clock: list[float], *, windows: int, ill_from: int, resolved_at: int | None = None) -> RunView:
    with closing(RunLog(folder / "hfopt" / "monitor.jsonl")) as log:
        log.write("header", model="M", device="cuda", max_steps=1000, gpus=[{"name": "A10"}])
        clock[0] += 5
        for i in range(windows):
            ill = i >= ill_from and (resolved_at is None or i < resolved_at)
            own = window(times={"data_wait_s": 40.0 if ill else 1.0}, first_step=10 * i + 1, last_step=10 * i + 10)
            clock[0] += own.seconds
            log.write("window", window=own)
            if i == ill_from:
                (found,) = (one for one in diagnose(own, facts()) if one.cause == "input_bound")
                log.write("finding", step=own.last_step, **asdict(found))
            if i == resolved_at:
                log.write("resolved", step=own.last_step, cause="input_bound")
    return run_text.view(history.load(folder))


def test_windows_stand_on_the_clock_of_the_run(tmp_path: Path, clock: list[float]) -> None:
    run = view(tmp_path, clock, windows=3, ill_from=9)
    each_s = window().seconds
    assert run.begin_s == pytest.approx(5)
    assert [point.until_s for point in run.points] == pytest.approx([5 + each_s, 5 + 2 * each_s, 5 + 3 * each_s])
    assert run.points[0].figures["gpu_util"] == pytest.approx(97) and sum(run.points[0].shares.values()) == pytest.approx(1)
    assert run.name == str(tmp_path) and run.power_limit_w == 150 and run.card_bytes == 24 << 30 and run.marks == ()


def test_a_finding_began_with_the_window_it_showed_in(tmp_path: Path, clock: list[float]) -> None:
    run = view(tmp_path, clock, windows=6, ill_from=2, resolved_at=5)
    (mark,) = run.marks
    assert mark.title == "input_bound" and mark.step == 21 and mark.at_s == pytest.approx(run.points[1].until_s)
    assert "resolved at step 60" in mark.words and not mark.words.startswith("input_bound")


def test_the_same_cause_again_is_resolved_on_its_own(tmp_path: Path, clock: list[float]) -> None:
    view(tmp_path, clock, windows=6, ill_from=2, resolved_at=5)
    found = history.load(tmp_path)
    again = {**found.findings[0], "time": clock[0] + 1}
    assert found.end_of(found.findings[0]) is not None and replace(found, findings=(again,)).end_of(again) is None


@pytest.mark.slow
def test_a_long_run_is_thinned_and_keeps_its_ends(tmp_path: Path, clock: list[float]) -> None:
    run = view(tmp_path, clock, windows=1300, ill_from=5000)
    assert 300 < len(run.points) <= 600
    assert run.points[-1].until_s == pytest.approx(5 + 1300 * window().seconds) and run.points[-1].last_step == 13000
    assert run.begin_s == pytest.approx(5, abs=0.1)


def test_an_oom_is_marked(tmp_path: Path, clock: list[float]) -> None:
    with closing(RunLog(tmp_path / "monitor.jsonl")) as log:
        log.write("header", model="M")
        clock[0] += 7
        log.write("fallback", seen={"phase": "backward", "step": 3, "micro_batch": 16}, step={"reason": "8 should fit"}, effective_batch=16)
    (mark,) = run_text.view(history.load(tmp_path)).marks
    assert (mark.title, mark.step, mark.at_s) == ("out of memory", 3, 7) and "16 samples: 8 should fit" in mark.words


def test_a_log_changed_by_hand_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "monitor.jsonl").write_text('{"kind": "header", "time": 1}\n{"kind": "window", "time": 2}\n')
    with pytest.raises(LogError, match="was not written by this version"):
        history.load(tmp_path)
