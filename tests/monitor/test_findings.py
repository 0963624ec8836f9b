"""A cause is told once, its end is told, and it is not told again at the end of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from watched import card, facts, spread, window

from hfopt.monitor.diagnose import Judge
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.log import Journal

ILL, WELL = window(times={"data_wait_s": 60.0}), window()


class Scene:
    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.written: list[tuple[str, Any]] = []
        journal = Journal(folder / "m.jsonl", rank=0, world_size=1, csv=False, max_bytes=1 << 20, faults=Faults(self.said.append))
        journal.write = lambda kind, **fields: self.written.append((kind, fields.get("cause")))  # type: ignore[method-assign]
        self.judge = Judge(facts(), journal, self.said.append, 30)

    def see(self, *windows: Any) -> None:
        for one in windows:
            self.judge.add(one)
            self.judge.recent(())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_told_once_while_it_lasts_and_once_when_it_is_over(scene: Scene) -> None:
    scene.see(ILL, ILL, ILL)
    assert [text.split(":")[1].strip() for text in scene.said] == ["input_bound"]
    scene.see(WELL, WELL, WELL)
    assert scene.said[1:] == ["hfopt: resolved at step 101: input_bound"]
    assert scene.written.count(("finding", "input_bound")) == 1 and scene.written.count(("resolved", "input_bound")) == 1


def test_one_good_window_is_not_the_end_of_it(scene: Scene) -> None:
    scene.see(ILL, WELL, WELL, ILL, WELL, ILL)
    assert len(scene.said) == 1


def test_the_good_verdict_is_written_but_not_a_warning(scene: Scene) -> None:
    scene.see(WELL, WELL)
    assert scene.said == [] and scene.written == [("finding", "compute_bound")]


def test_at_the_end_only_what_was_never_told_is_written(scene: Scene) -> None:
    scene.see(ILL)
    told = len(scene.written)
    assert {finding.cause for finding in scene.judge.whole(window(times={"data_wait_s": 60.0}, padding_share=0.5), ())} == {
        "input_bound",
        "padding_waste",
    }
    assert scene.written[told:] == [("finding", "padding_waste")]


def test_low_utilization_without_a_cause_is_told_once(scene: Scene) -> None:
    idle = window(gpu=card(sm_util=spread(0.12), memory_util=None, power_w=None), mfu=None)
    scene.see(idle, idle, idle)
    assert len(scene.said) == 1 and "12 %" in scene.said[0]


def test_a_log_before_the_first_window_is_judged_as_nothing(scene: Scene) -> None:
    scene.judge.recent(())
    assert not scene.said
