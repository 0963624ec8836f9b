"""HFGpuMonitor in a real Trainer: what it measures, writes, reports and says, and that nothing that breaks in it reaches the training."""

from __future__ import annotations

import copy
import csv
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nvml_standin import NvmlStandin
from transformers import TrainerCallback
from watched import Sentences, SlowCollator, lines, trainer

from hfopt.monitor import history, metrics, run_text, session
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.oom.protect import protect

pytestmark = pytest.mark.usefixtures("unhurried")


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_log_tells_the_run_from_header_to_summary(tmp_path: Path) -> None:
    trainer(tmp_path, HFGpuMonitor()).train()
    kinds = [line["kind"] for line in lines(tmp_path)]
    assert kinds[0] == "header" and kinds[-1] == "summary"
    (head,) = lines(tmp_path, "header")
    assert head["device"] == "cpu" and head["versions"]["transformers"] == transformers.__version__
    assert head["config"]["per_device_train_batch_size"] == 4
    windows = lines(tmp_path, "window")
    assert [(window["first_step"], window["last_step"]) for window in windows] == [(2, 4), (5, 8), (9, 12)]
    (summary,) = lines(tmp_path, "summary")
    assert summary["steps"] == 11  # the first step is warm-up
    assert summary["seconds"] == pytest.approx(sum(summary["phases"].values()))
    assert summary["metrics"]["hfopt/samples_per_s"] == pytest.approx(44 / summary["seconds"])
    assert summary["metrics"]["hfopt/tokens_per_s"] == pytest.approx(8 * 44 / summary["seconds"])


def test_times_are_those_of_the_phases(tmp_path: Path) -> None:
    class Slow(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.006)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.004)

    class SlowForward(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            time.sleep(0.03)
            return super().compute_loss(*args, **kwargs)

    run = trainer(tmp_path, HFGpuMonitor(), kind=SlowForward, collator=SlowCollator(0.02), gradient_accumulation_steps=2)
    run.add_callback(Slow())  # after the monitor, which must count it all the same
    began_s = time.monotonic()
    run.train()
    wall_s = time.monotonic() - began_s
    (summary,) = lines(tmp_path, "summary")
    per_step = {name: value / summary["steps"] for name, value in summary["phases"].items()}
    assert per_step["data_wait_s"] >= 0.04
    assert per_step["forward_backward_s"] >= 0.06
    assert per_step["optimizer_s"] >= 0.006
    assert per_step["other_s"] >= 0.004
    assert sum(summary["phases"].values()) <= wall_s  # nothing is counted twice


def test_a_slow_collator_is_found_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, HFGpuMonitor(), collator=SlowCollator(0.4), max_steps=16).train()
    (finding,) = [line for line in lines(tmp_path, "finding") if line["cause"] == "input_bound"]
    assert finding["evidence"]["data_wait_share"] > 0.4 and finding["confidence"] > 0.9
    assert {change["key"] for change in finding["changes"]} >= {"dataloader_num_workers"}
    before_the_end = capsys.readouterr().err.split("steps in")[0]
    assert before_the_end.count("input_bound") == 1


def test_evaluation_at_every_step_is_found(tmp_path: Path) -> None:
    trainer(tmp_path, HFGpuMonitor(), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1, max_steps=60).train()
    assert "eval_heavy" in {line["cause"] for line in lines(tmp_path, "finding")}
    (summary,) = lines(tmp_path, "summary")
    assert sum(window["window"]["evals"] for window in lines(tmp_path, "window")) >= 10
    assert summary["phases"]["eval_s"] > summary["phases"]["data_wait_s"]


def test_padding_is_measured(tmp_path: Path) -> None:
    trainer(tmp_path, HFGpuMonitor(), dataset=Sentences(length=8, padding=5), collator=SlowCollator(0.05)).train()
    (finding,) = [line for line in lines(tmp_path, "finding") if line["cause"] == "padding_waste"]
    assert finding["evidence"]["padding_share"] == pytest.approx(5 / 8)


def test_each_epoch_has_its_line_and_epoch_logging_its_window(tmp_path: Path) -> None:
    trainer(tmp_path, HFGpuMonitor(), dataset=Sentences(16), max_steps=-1, num_train_epochs=3, logging_strategy="epoch").train()
    assert [line["epoch"] for line in lines(tmp_path, "epoch")] == [1.0, 2.0, 3.0]
    assert [window["last_step"] for window in lines(tmp_path, "window")] == [4, 8, 12]


def test_metrics_reach_a_real_tensorboard_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer(tmp_path, HFGpuMonitor(), report_to=["tensorboard"], logging_steps=3).train()
    (file,) = (tmp_path / "tb").rglob("events.*") if (tmp_path / "tb").exists() else tmp_path.rglob("events.*")
    events = EventAccumulator(str(file)).Reload()
    written = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for name in ("samples_per_s", "tokens_per_s", "data_wait", "step_s", "forward_backward_s", "optimizer_s", "mfu", "cpu_util"):
        assert written[f"train/hfopt/{name}"], name
    assert written["train/hfopt/step_s"] == [3, 6, 9, 12]
    assert "train/loss" in written


def test_windows_are_joined_where_logging_them_all_would_cost_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_GRACE_S", 0.0)
    monkeypatch.setattr(session, "_BUDGET", 1e-9)
    trainer(tmp_path, HFGpuMonitor(), logging_steps=1).train()
    spans = [(window["first_step"], window["last_step"]) for window in lines(tmp_path, "window")]
    assert 1 <= len(spans) < 11 and spans[0][0] == 2 and spans[-1][1] == 12
    assert all(before[1] + 1 == after[0] for before, after in pairwise(spans)), "no step is lost"


def test_the_users_own_logs_are_left_as_they_are(tmp_path: Path) -> None:
    run = trainer(tmp_path, HFGpuMonitor())
    run.train()
    assert not [key for row in run.state.log_history for key in row if key.startswith("hfopt")]


def test_the_table_of_windows(tmp_path: Path) -> None:
    trainer(tmp_path, HFGpuMonitor(csv=True)).train()
    with (tmp_path / "hfopt" / "monitor.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["last_step"] for row in rows] == ["4", "8", "12"]
    assert set(metrics.KEYS) < set(rows[0]) and float(rows[0]["step_s"]) > 0


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    results = []
    for monitors in ([], [HFGpuMonitor()]):
        transformers.set_seed(1)
        run = trainer(tmp_path, monitors[0] if monitors else TrainerCallback(), lr_scheduler_type="cosine", learning_rate=1e-2)
        run.train()
        results.append(weights(run.model))
    assert torch.equal(*results)


def test_several_trainings_and_a_resume_in_one_process(tmp_path: Path) -> None:
    monitor = HFGpuMonitor()
    run = trainer(tmp_path, monitor, save_strategy="steps", save_steps=6)
    run.train()
    run.train()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    heads, ends = lines(tmp_path, "header"), lines(tmp_path, "summary")
    assert [head["first_step"] for head in heads] == [0, 0, 6]
    assert [end["steps"] for end in ends] == [11, 11, 5]
    assert not run.model._forward_pre_hooks and not run.model._forward_hooks


def test_a_copy_or_pickle_carries_options_only(tmp_path: Path) -> None:
    monitor = HFGpuMonitor(interval=0.5, output=tmp_path / "elsewhere")
    seen: list[HFGpuMonitor] = []

    class Copies(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(pickle.loads(pickle.dumps(monitor)))
            copy.deepcopy(monitor)
            copy.deepcopy(model)

    run = trainer(tmp_path, monitor, max_steps=2)
    run.add_callback(Copies())
    run.train()
    assert seen[0]._options == monitor._options and seen[0]._session is None
    assert (tmp_path / "elsewhere" / "monitor.jsonl").exists()


class Breaks(SlowCollator):
    """Raises at its fourth batch, once."""

    calls = 0

    def __call__(self, rows: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            raise RuntimeError("broken batch")
        return super().__call__(rows)


def sampling_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hfopt-sampler"]


def test_a_training_that_raised_leaves_no_thread_and_no_hook(tmp_path: Path) -> None:
    run = trainer(tmp_path, HFGpuMonitor(interval=0.02), collator=Breaks(0.0))
    with pytest.raises(RuntimeError, match="broken batch"):
        run.train()
    for thread in sampling_threads():
        thread.join(timeout=60)
    assert not sampling_threads()
    assert not run.model._forward_pre_hooks
    assert lines(tmp_path)[-1]["kind"] == "interrupted" and lines(tmp_path)[-1]["step"] < 12
    assert json.loads((tmp_path / "hfopt" / "live.json").read_text())["ended"] is True
    assert "ended by an error or Ctrl-C" in run_text.report(history.load(tmp_path))


def test_the_thread_goes_on_while_the_training_does(tmp_path: Path) -> None:
    """Also where train() itself is wrapped, as by hfopt.protect."""
    alive: list[int] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            alive.append(len(sampling_threads()))

    run = protect(trainer(tmp_path, HFGpuMonitor(interval=0.01), collator=SlowCollator(0.03)))
    run.add_callback(Look())
    run.train()
    assert set(alive) == {1} and not sampling_threads()
    assert lines(tmp_path)[-1]["kind"] == "summary"


def test_a_training_that_raised_can_be_started_again(tmp_path: Path) -> None:
    run = trainer(tmp_path, HFGpuMonitor(), collator=Breaks(0.0))
    with pytest.raises(RuntimeError, match="broken batch"):
        run.train()
    run.train()
    assert len(lines(tmp_path, "header")) == 2 and len(lines(tmp_path, "summary")) == 1
    assert not run.model._forward_pre_hooks


def test_no_token_is_ever_written(tmp_path: Path) -> None:
    secret = "hf_" + "a1B2" * 8
    trainer(tmp_path, HFGpuMonitor(), hub_token=secret, run_name=f"run {secret}", max_steps=2).train()
    assert all(secret not in file.read_text() for file in (tmp_path / "hfopt").iterdir())


def test_the_bar_shows_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.monitor.sampler._MOST_OF_TIME", 1.0)  # at its interval also where a reading is slow
    shown: list[str] = []

    class Bar(TrainerCallback):  # type: ignore[misc]
        """As ProgressCallback has one."""

        def __init__(self) -> None:
            self.training_bar: Any = self

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            shown.append(text)

        def write(self, text: str, file: Any = None) -> None:
            shown.append(text)

    run = trainer(tmp_path, HFGpuMonitor(interval=0.02), collator=SlowCollator(0.02), max_steps=60)
    run.add_callback(Bar())
    run.train()
    assert any("CPU: " in text and "RAM: " in text and "data wait " in text and "GPU" not in text for text in shown)


class Faulty:
    """Each way in which the world can fail the monitor."""

    @staticmethod
    def disk_full(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        (folder / "full").mkdir()
        (folder / "full" / "monitor.jsonl").symlink_to("/dev/full")
        return HFGpuMonitor(output=folder / "full")

    @staticmethod
    def unwritable_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        (folder / "file").write_text("")
        return HFGpuMonitor(output=folder / "file" / "sub")

    @staticmethod
    def broken_reporter(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        monkeypatch.setattr(metrics, "reporters", lambda handler: 1 / 0)
        return HFGpuMonitor()

    @staticmethod
    def broken_session(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        monkeypatch.setattr(session, "find_place", lambda args: 1 / 0)
        return HFGpuMonitor()

    @staticmethod
    def broken_diagnosis(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        monkeypatch.setattr("hfopt.monitor.diagnose.diagnose", lambda *args: {}["nothing"])
        return HFGpuMonitor()

    @staticmethod
    def broken_clock(monkeypatch: pytest.MonkeyPatch, folder: Path) -> HFGpuMonitor:
        monkeypatch.setattr("hfopt.monitor.step_clock.StepClock.take", lambda self: {}[0])
        return HFGpuMonitor()


@pytest.mark.parametrize("fault", [name for name in vars(Faulty) if not name.startswith("_")])
def test_a_fault_is_said_once_and_training_goes_on(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = getattr(Faulty, fault)(monkeypatch, tmp_path)
    run = trainer(tmp_path, monitor, logging_steps=2)
    assert run.train().global_step == 12
    said = [line for line in capsys.readouterr().err.splitlines() if "is switched off" in line or "cannot be written" in line]
    assert len(said) == len(set(said)) and 1 <= len(said) <= 2, said


def test_a_fork_of_the_script_that_ends_is_not_the_end_of_the_run(tmp_path: Path) -> None:
    """What is registered for the interpreter's end runs in a fork too, where the script leaves it by sys.exit()."""
    monitor = HFGpuMonitor()

    class Forks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 6 and (watched := monitor._session) is not None:
                child = os.fork()
                if child == 0:
                    try:
                        watched._interrupted()
                    finally:
                        os._exit(0)
                os.waitpid(child, 0)

    run = trainer(tmp_path, monitor)
    run.add_callback(Forks())
    run.train()
    kinds = [line["kind"] for line in lines(tmp_path)]
    assert "interrupted" not in kinds and kinds[-1] == "summary" and kinds.count("window") == 3


@pytest.mark.slow  # a fresh interpreter
def test_a_killed_run_keeps_its_log(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from watched import trainer; from transformers import TrainerCallback; from hfopt.monitor.callback import HFGpuMonitor\n"
        f"out = Path({str(tmp_path)!r})\n"
        "class Kill(TrainerCallback):\n    def on_step_end(self, args, state, control, **kwargs):\n"
        "        log = out / 'hfopt' / 'monitor.jsonl'\n"
        '        if log.exists() and log.read_text().count(\'"kind": "window"\') >= 2: os.kill(os.getpid(), signal.SIGKILL)\n'
        "run = trainer(out, HFGpuMonitor(), max_steps=400); run.add_callback(Kill()); run.train()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**_environment()}, capture_output=True)
    assert done.returncode == -9
    assert [line["kind"] for line in lines(tmp_path)].count("window") >= 2


def _environment() -> dict[str, str]:
    here = Path(__file__).parent.parent
    return {**os.environ, "PYTHONPATH": f"{here.parent}:{here / 'support'}"}


@pytest.fixture
def pretended_card(nvml_standin: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> NvmlStandin:
    """A card that NVML lists and that the run believes to be its own, while the arithmetic is done by the CPU."""
    nvml_standin.card(0, util=85, memory_util=60, used_mib=4000, power_mw=200_000, energy_mj=None)
    nvml_standin.use(monkeypatch)
    monkeypatch.setattr("hfopt.monitor.run_setup.torch_uuids", lambda args: (nvml_standin.uuid(0),))
    return nvml_standin


def test_the_cards_readings_reach_log_and_summary(tmp_path: Path, pretended_card: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.monitor.sampler._MOST_OF_TIME", 1.0)
    trainer(tmp_path, HFGpuMonitor(interval=0.05), collator=SlowCollator(0.05)).train()
    (summary,) = lines(tmp_path, "summary")
    assert summary["metrics"]["hfopt/gpu_util"] == pytest.approx(85)
    assert summary["metrics"]["hfopt/gpu_memory_used_gib"] == pytest.approx(4000 / 1024)
    assert summary["metrics"]["hfopt/energy_j"] > 0
    (head,) = lines(tmp_path, "header")
    assert "3070" in head["gpus"][0]["name"]


def test_a_card_lost_in_the_middle_is_said_once(
    tmp_path: Path, pretended_card: NvmlStandin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lose(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                pretended_card.change(0, lost=1)
                until = time.monotonic() + 60
                while not monitor._session.faults.off and time.monotonic() < until:  # type: ignore[union-attr]
                    time.sleep(0.02)  # the next reading finds it, whenever that is

    monkeypatch.setattr("hfopt.monitor.sampler._MOST_OF_TIME", 1.0)
    monitor = HFGpuMonitor(interval=0.02)
    run = trainer(tmp_path, monitor)
    run.add_callback(Lose())
    assert run.train().global_step == 12
    said = [line for line in capsys.readouterr().err.splitlines() if "is switched off" in line]
    assert len(said) == 1 and pretended_card.uuid(0) in said[0]


def test_without_a_driver_the_cpu_is_watched(tmp_path: Path, pretended_card: NvmlStandin, capsys: pytest.CaptureFixture[str]) -> None:
    pretended_card.set(init=9)
    trainer(tmp_path, HFGpuMonitor()).train()
    said = [line for line in capsys.readouterr().err.splitlines() if "is switched off" in line]
    assert len(said) == 1 and "GPU readings" in said[0]
    (summary,) = lines(tmp_path, "summary")
    assert "hfopt/samples_per_s" in summary["metrics"] and "hfopt/gpu_util" not in summary["metrics"]
