"""What `hfopt watch` shows of a live run: loss, ETA, and the share of the machine it gets."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hfopt.errors import LogError
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.history import newest_run
from hfopt.monitor.host_usage import HostProbe, queued_s
from hfopt.monitor.log import LIVE
from hfopt.monitor.screen import lines, live_html


def live(**state: Any) -> dict[str, Any]:
    points = [{"cpu": 0.06, "core_wait": 0.8}]
    return {"time": time.time(), "pid": os.getpid(), "ended": False, "step": 25, "max_steps": 100, "points": points, **state}


def test_loss_and_eta_are_shown() -> None:
    shown = lines(live(loss=0.69314, s_per_step=2.0), 100)
    assert shown[0].endswith("step 25 of 100 (25 %)")
    assert shown[1].startswith("loss 0.6931, ETA 2 min 30 s (") and shown[1].endswith("2.0 s a step")
    assert "ETA" not in "\n".join(lines(live(loss=0.5, s_per_step=2.0, ended=True), 100)), "an ended run has no rest"
    assert lines(live(), 100)[1].startswith("CPU"), "nothing is made up before the first window"


def test_a_notebook_shows_the_run_of_its_monitor(tmp_path: Path) -> None:
    monitor = HFGpuMonitor(output=tmp_path)
    assert "no train() yet" in monitor._repr_html_()
    assert live_html(tmp_path).startswith("<pre>no run with HFGpuMonitor is in ")
    (tmp_path / LIVE).write_text(json.dumps(live(loss=0.5, findings=["<b>slow</b>\x1b[2J"])))
    shown = live_html(tmp_path)
    assert "step 25 of 100 (25 %)" in shown and "loss 0.5" in shown
    assert "&lt;b&gt;slow" in shown and "<b>" not in shown and "\x1b" not in shown, "words of others are words"


def test_the_share_of_the_machine_is_shown_and_a_starved_run_is_not_called_well() -> None:
    shown = "\n".join(lines(live(cores=2.0), 100))
    assert "this run has 0.12 of 2 cores (6 %); its main thread waits 80 % of the time for a core: others use the machine" in shown
    alone = live(cores=2.0, points=[{"cpu": 0.95, "core_wait": 0.02}])
    assert "this run has 1.90 of 2 cores (95 %)" in lines(alone, 100) and "others" not in "\n".join(lines(alone, 100))


def test_the_kernel_counts_the_wait_for_a_core(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("5000000000 2500000000 17\n")
    assert queued_s(tmp_path / "schedstat") == 2.5
    (tmp_path / "schedstat").write_text("0 0 0\n")
    assert queued_s(tmp_path / "schedstat") is None and queued_s(tmp_path / "none") is None
    probe = HostProbe(cores=2.0)
    probe.read()
    wait = probe.read().core_wait
    assert (wait is None) is (queued_s() is None) and (wait is None or 0 <= wait <= 1)


def test_the_newest_run_below_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="no run with HFGpuMonitor"):
        newest_run(tmp_path)
    for age, name in enumerate(("new", "runs/old", "older")):
        log = tmp_path / name / "hfopt" / "monitor.jsonl"
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (1e9 - age, 1e9 - age))
    assert newest_run(tmp_path) == tmp_path / "new" / "hfopt" / "monitor.jsonl"
