"""Launches laid out in time: what runs when, and what the card waits for."""

from __future__ import annotations

from typing import Any

import pytest

from hfopt.speed.launch_timeline import IssuedEvent, lay_out


def launch(device_s: float, *, phase: str = "forward", launch_s: float = 1.0, stream: str = "0", **more: Any) -> IssuedEvent:
    return IssuedEvent(kind="launch", phase=phase, launch_s=launch_s, device_s=device_s, stream=stream, **more)


SYNC = IssuedEvent(kind="sync", phase="backward", stream="0")


def test_a_card_that_is_slower_than_the_host_is_never_idle() -> None:
    seen = lay_out([launch(10.0), launch(20.0, phase="backward")], sync_s=0.5)
    assert seen.step_s == pytest.approx(30.0)
    assert seen.phase_s == pytest.approx({"forward": 10.0, "backward": 20.0})
    assert seen.idle_s == {}


def test_a_card_that_is_faster_waits_for_launches() -> None:
    seen = lay_out([launch(0.25), launch(0.25)], sync_s=0.5)
    assert seen.step_s == pytest.approx(2.0)
    assert (seen.busy_s, seen.idle_s) == (pytest.approx(0.5), {"launch": pytest.approx(1.5)})


def test_a_sync_drains_the_card_and_the_wait_is_put_down_to_it() -> None:
    seen = lay_out([launch(10.0), SYNC], sync_s=0.5)
    assert seen.step_s == pytest.approx(11.5)  # the kernel, the host that learns of it, the next launch
    assert seen.idle_s == pytest.approx({"sync": 0.5, "launch": 1.0})


def test_fetching_data_and_python_are_told_apart() -> None:
    seen = lay_out([launch(10.0, work_s=5.0, input_s=3.0), SYNC], sync_s=0.5)
    assert seen.idle_s == pytest.approx({"sync": 0.5, "input": 3.0, "python": 2.0, "launch": 1.0})
    assert seen.step_s == pytest.approx(sum(seen.phase_s.values()))


def test_marks_say_where_host_and_card_are_after_each_event() -> None:
    seen = lay_out([launch(10.0), launch(0.5, phase="backward"), SYNC], sync_s=0.25)
    assert seen.marks == [pytest.approx(pair) for pair in ((1.0, 11.0), (2.0, 11.5), (11.75, 11.75))]


def test_streams_run_beside_each_other_until_one_waits() -> None:
    beside = [launch(10.0), launch(10.0, stream="7")]
    assert lay_out(beside, sync_s=0.0).step_s == pytest.approx(10.0)
    recorded = IssuedEvent(kind="record", phase="forward", stream="0", event="0x1")
    waited = IssuedEvent(kind="wait", phase="forward", stream="7", event="0x1")
    behind = lay_out([beside[0], recorded, waited, beside[1], SYNC, IssuedEvent(kind="sync", phase="forward")], sync_s=0.0)
    assert behind.step_s == pytest.approx(21.0)


def test_communication_is_hidden_behind_kernels_and_what_is_not_is_said() -> None:
    reduced = IssuedEvent(kind="collective", phase="backward", launch_s=1.0, device_s=30.0, stream="9")
    recorded = IssuedEvent(kind="record", phase="backward", stream="9", event="0x2")
    waited = IssuedEvent(kind="wait", phase="optimizer", stream="0", event="0x2")
    events = [launch(5.0), reduced, launch(20.0, phase="backward"), recorded, waited, launch(2.0, phase="optimizer"), SYNC]
    seen = lay_out(events, sync_s=0.0)
    assert seen.busy_s == pytest.approx(27.0)
    assert seen.idle_s["communication"] == pytest.approx(seen.step_s - 27.0 - seen.idle_s["launch"])
    assert 5.0 < seen.idle_s["communication"] < 10.0  # 30 seconds less what the backward hides


def test_workers_that_are_too_slow_set_the_pace() -> None:
    seen = lay_out([launch(10.0)], sync_s=0.0, fetch_s=25.0)
    assert (seen.step_s, seen.idle_s["input"], seen.phase_s["data"]) == (25.0, pytest.approx(15.0), pytest.approx(15.0))
    assert lay_out([launch(10.0)], sync_s=0.0, fetch_s=9.0).step_s == pytest.approx(10.0)
