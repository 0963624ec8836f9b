"""The monitor where a machine or a script is hard on it: training goes on, and what is written stays true."""

from __future__ import annotations

import copy
import csv
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback
from watched import SlowCollator, lines, trainer

from hfopt.monitor import history, log, run_text, session
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.evidence import anonymous_bytes
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.log import CsvLog, Journal, rotated
from hfopt.monitor.screen import condition
from hfopt.schema import GpuReading
from hfopt.units import MIB

pytestmark = pytest.mark.usefixtures("unhurried")


class At(TrainerCallback):  # type: ignore[misc]
    """Does something once, at the end of a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            self.act()


def test_early_stopping_has_its_summary(tmp_path: Path) -> None:
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.0}
    run = trainer(tmp_path, HFGpuMonitor(), max_steps=40, **often, **best)
    run.add_callback(EarlyStoppingCallback(1))
    run.train()
    last = run.state.global_step
    assert last < 40 and lines(tmp_path)[-1]["kind"] == "summary" and lines(tmp_path)[-1]["step"] == last
    assert lines(tmp_path, "window")[-1]["last_step"] == last


def test_a_progress_bar_that_is_removed_in_the_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trainer(tmp_path, HFGpuMonitor(), disable_tqdm=False)
    run.add_callback(At(6, lambda: run.remove_callback(ProgressCallback)))
    run.train()
    assert lines(tmp_path)[-1]["kind"] == "summary" and "is switched off" not in capsys.readouterr().err


def test_a_whole_trainer_is_copied_in_the_middle(tmp_path: Path) -> None:
    copies: list[Any] = []
    run = trainer(tmp_path, HFGpuMonitor())
    run.add_callback(At(6, lambda: copies.append(copy.deepcopy(run))))
    run.train()
    assert lines(tmp_path)[-1]["kind"] == "summary"
    copies[0].args.output_dir = str(tmp_path / "copy")
    copies[0].train()
    assert lines(tmp_path / "copy", "summary")[0]["steps"] == 11 and len(lines(tmp_path, "header")) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_two_trainers_in_threads(shared: bool, tmp_path: Path) -> None:
    one = HFGpuMonitor()
    runs = {
        name: trainer(tmp_path / name, one if shared else HFGpuMonitor(), collator=SlowCollator(0.01), max_steps=steps)
        for name, steps in (("a", 12), ("b", 20))
    }
    threads = [threading.Thread(target=run.train) for run in runs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [lines(tmp_path / name, "summary")[0]["steps"] for name in runs] == [11, 19]
    assert [lines(tmp_path / name, "window")[-1]["last_step"] for name in runs] == [12, 20]


def test_a_forked_process_watches_nothing(tmp_path: Path) -> None:
    """The sampling thread may hold a lock at the moment of the fork; nobody gives it back in the child, where it would be waited for."""
    monitor, ended = HFGpuMonitor(), []

    def fork() -> None:
        watched = monitor._session
        assert watched is not None
        with watched.clock._lock:
            child = os.fork()
            if child == 0:
                run.evaluate()  # its log asks the clock
                os._exit(0 if monitor._session is None and not run.model._forward_pre_hooks else 1)
        ended.append(os.waitpid(child, 0)[1])

    run = trainer(tmp_path, monitor)
    run.add_callback(At(6, fork))
    run.train()
    assert ended == [0]
    assert lines(tmp_path, "summary")[0]["steps"] == 11


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps(jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + ahead_s[0])
    run = trainer(tmp_path, HFGpuMonitor())
    run.add_callback(At(6, lambda: ahead_s.__setitem__(0, jump_s)))
    run.train()
    times = [line["time"] for line in lines(tmp_path)]
    assert times == sorted(times) and times[-1] - times[0] < 1000
    assert lines(tmp_path, "summary")[0]["seconds"] < 1000
    view = run_text.view(history.load(tmp_path))
    assert [point.until_s for point in view.points] == sorted(point.until_s for point in view.points)


def test_a_rank_is_compared_whatever_its_clock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, ahead_s = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: wall() + ahead_s[0])
    now = session.RunTime()
    began = now()
    ahead_s[0] = -3600.0
    log.RankFile(tmp_path, 0, now).write(stamps=[(1, now(), now(), now(), now())], summary={}, ended=False)
    (note,) = log.read_notes(tmp_path, 1, since=began).values()
    assert note["stamps"][0][1] >= began


def test_a_sign_of_life_from_the_future_is_none() -> None:
    assert condition({"time": time.time() + 3600, "pid": 2**22 + 1}) == "gone"


STOPPABLE = """
import ctypes, sys, time
from hfopt.monitor import sampler, step_clock
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.host_usage import HostReading
sampler.LONG_S = 0.5
class Host:
    def read(self): return HostReading()
one = sampler.Sampler(gpus=None, host=Host(), faults=Faults(print), interval_s=0.05)
one.start()
began = time.monotonic()
print("ready", flush=True)
if sys.argv[1] == "holds the lock":
    ctypes.PyDLL(None).usleep(1_500_000)
else:
    sys.stdin.readline()
ended = time.monotonic()
time.sleep(0.5)
print(one.stopped_s(began, ended), one.stopped_s(ended + 0.4, ended + 9), flush=True)
"""


@pytest.mark.parametrize("how", ["stopped", "holds the lock"])
def test_a_stop_is_told_from_a_thread_that_waits_for_the_interpreter(how: str) -> None:
    command = [sys.executable, "-c", STOPPABLE, how]
    process = subprocess.Popen(command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    if how == "stopped":
        time.sleep(0.2)  # it sleeps between two readings
        process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        process.send_signal(signal.SIGCONT)
    found, later = map(float, process.communicate("go\n")[0].split())
    assert (2.0 < found < 60.0) == (how == "stopped"), found
    assert later == 0.0


STOPPED_RUN = """
import pickle, sys
from pathlib import Path
from transformers import TrainerCallback
from watched import trainer
from hfopt.monitor import sampler, session, step_clock
from hfopt.monitor.callback import HFGpuMonitor
session._GRACE_S, sampler.LONG_S, step_clock.LONG_S = 60, 1.0, 1.0
class Wait(TrainerCallback):
    def on_step_begin(self, args, state, control, **more):
        if state.global_step == 6:
            print("ready", flush=True)
            sys.stdin.readline()
run = trainer(Path(sys.argv[1]), HFGpuMonitor(interval=0.2))
run.add_callback(Wait())
assert pickle.loads(pickle.dumps(run)).callback_handler.callbacks
run.train()
"""


@pytest.mark.slow  # a fresh interpreter
def test_the_time_of_a_stopped_process_counts_nowhere(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STOPPED_RUN, str(tmp_path)]
    process = subprocess.Popen(
        command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        assert line, "it ended early"
    time.sleep(1.0)
    process.send_signal(signal.SIGSTOP)
    time.sleep(12.0)
    process.send_signal(signal.SIGCONT)
    process.communicate("go\n")
    (warning,) = lines(tmp_path, "warning")
    assert "the process stood still for" in warning["message"]
    (summary,) = lines(tmp_path, "summary")
    span_s = lines(tmp_path)[-1]["time"] - lines(tmp_path)[0]["time"]
    assert summary["seconds"] < span_s - 9.0, "in none of the phases"


def _environment() -> dict[str, str]:
    here = Path(__file__).parents[1]
    return {**os.environ, "PYTHONPATH": f"{here.parent}:{here / 'support'}"}


def test_a_disk_that_fills_loses_lines_and_not_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "monitor.jsonl", rank=0, world_size=1, csv=True, max_bytes=1 << 20, faults=Faults(said.append))
    put, full = log.RunLog._put, [True]

    def refuses(self: log.RunLog, line: bytes) -> None:
        if full[0]:
            self.close()
            raise OSError(28, "No space left on device")
        put(self, line)

    monkeypatch.setattr(log.RunLog, "_put", refuses)
    with closing(journal):
        journal.write("header", device="cpu")
        journal.write("epoch", n=1)
        full[0] = False
        journal.write("epoch", n=2)
        full[0] = True
        journal.write("epoch", n=3)
        full[0] = False
        journal.write("summary", n=4)
    found = list(log.read(tmp_path / "monitor.jsonl"))
    assert [(line["kind"], line.get("n")) for line in found] == [
        ("header", None), ("warning", None), ("epoch", 2), ("warning", None), ("summary", 4),
    ]  # fmt: skip
    assert "2 lines before this one" in found[1]["message"] and "1 lines before this one" in found[3]["message"]
    assert len(said) == 1 and "tried again" in said[0] and "No space left" in said[0]


def test_the_table_is_bounded_like_the_log(tmp_path: Path) -> None:
    table = CsvLog(tmp_path / "monitor.csv", max_bytes=200)
    for n in range(200):
        table.write({"n": n, "x": "0123456789"})
    files = sorted(tmp_path.iterdir())
    assert files == [table.path, *(rotated(table.path, number) for number in (1, 2, 3))]
    assert all(file.stat().st_size < 300 for file in files)
    with table.path.open() as stream:
        assert list(csv.DictReader(stream))[-1]["n"] == "199"


@pytest.mark.slow
def test_a_million_steps_take_bounded_memory_and_log(tmp_path: Path) -> None:
    """The callbacks of a million steps with a window every ten of them, without the Trainer between them."""

    monitor = HFGpuMonitor(csv=True)
    run = trainer(tmp_path, monitor)
    args, state, control = run.args, run.state, run.control
    monitor._options = dataclasses.replace(monitor._options, max_log_bytes=1 << 20)
    monitor.on_train_begin(args, state, control, model=run.model)
    state.max_steps, held = 10**6, {}
    try:
        for step in range(1, 10**6 + 1):
            monitor.on_step_begin(args, state, control)
            monitor.on_pre_optimizer_step(args, state, control)
            state.global_step = step
            monitor.on_step_end(args, state, control)
            if step % 10 == 0:
                monitor.on_log(args, state, control)
            if step in (10**5, 10**6):
                held[step] = anonymous_bytes()
    finally:
        monitor.on_train_end(args, state, control)
    assert lines(tmp_path, "summary")[0]["steps"] == 10**6 - 1
    assert held[10**6] - held[10**5] < 16 * MIB, held  # type: ignore[operator]
    assert sum(file.stat().st_size for file in (tmp_path / "hfopt").iterdir()) < 9 * MIB


@pytest.mark.slow
def test_a_loss_that_is_kept_is_found_with_its_graph(tmp_path: Path) -> None:
    """Each step keeps its loss, and with it the activations: the leak that most scripts have once."""
    kept: list[torch.Tensor] = []

    class Keeps(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            ballast = torch.ones(33 << 18, requires_grad=True)  # 33 MiB, kept by its graph; smaller ones may come from what malloc kept
            loss = super().compute_loss(model, inputs, *args, **more)
            kept.append((ballast * ballast).sum())
            return loss

    run = trainer(tmp_path, HFGpuMonitor(), kind=Keeps, max_steps=40, logging_steps=2)
    run.train()
    (finding,) = [line for line in lines(tmp_path, "finding") if line["cause"] == "memory_creep"]
    kept.clear()
    assert finding["evidence"]["bytes_per_step"] == pytest.approx(33 * MIB, rel=0.5)
    assert "with its graph" in finding["message"] and ".item()" in finding["message"]


class LyingCard:
    """A driver's answers no card can give, or no answer of the agreed form."""

    def __init__(self, **lies: Any) -> None:
        self.lies = lies

    def read(self) -> tuple[Any, ...]:
        return (GpuReading(uuid="GPU-0", **self.lies),)

    def facts(self) -> tuple[Any, ...]:
        return ()

    def close(self) -> None:
        return None


@pytest.mark.parametrize(
    "lies",
    [
        {"used_bytes": 5, "total_bytes": 0, "sm_util": 2.55, "power_w": -1.0},
        {"used_bytes": -1, "total_bytes": -1},
        {"sm_util": float("nan"), "power_w": float("inf"), "temperature_c": float("nan"), "total_bytes": 8 << 30},
        {"sm_util": "100", "total_bytes": 8 << 30},
        {"energy_j": -5.0, "total_bytes": 8 << 30, "power_w": 1e9},
    ],
    ids=["nothing of it", "negative", "not a number", "words", "energy"],
)
def test_a_driver_that_lies(lies: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = session.find_place

    def with_card(args: Any) -> Any:
        return dataclasses.replace(place(args), cards=LyingCard(**lies), uuids=("GPU-0",))

    monkeypatch.setattr(session, "find_place", with_card)
    run = trainer(tmp_path, HFGpuMonitor(interval=0.02), collator=SlowCollator(0.02))
    assert run.train().global_step == 12
    (summary,) = lines(tmp_path, "summary")
    assert lines(tmp_path, "header") and run_text.report(history.load(tmp_path))
    figures = summary["metrics"]
    assert not {"hfopt/gpu_util", "hfopt/gpu_power_w", "hfopt/gpu_temperature_c"} & figures.keys(), figures
    assert figures["hfopt/samples_per_s"] > 0
