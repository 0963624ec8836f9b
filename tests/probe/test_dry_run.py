"""Dry runs that succeed, run out of memory, fail, hang and are killed."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hfopt.config.settings import with_raw
from hfopt.errors import DryRunError
from hfopt.probe import dry_run as module
from hfopt.probe.dry_run import Extent, Prepared, dry_run
from hfopt.process import child_process
from hfopt.schema import REHEARSED_MICRO_BATCHES, Candidate, Gpu, Lora, ModelSpec, Precision, Quantization, TrainJob
from hfopt.units import GIB, MIB

CANDIDATE = Candidate(per_device_batch=4, accumulation=2, precision="fp32")
CARD = Gpu(name="Virtual A10", memory_bytes=2 * GIB, capability=(8, 6), sms=72)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.slow
def test_on_the_cpu_steps_are_really_run_and_measured(tiny_job: TrainJob, scratch: Path) -> None:
    trial = dry_run(tiny_job, CANDIDATE, device="cpu", timeout_s=200)
    assert trial.outcome == "ok", trial.message
    assert trial.step_s is not None and trial.step_s > 0
    assert trial.data_wait_s is not None and trial.data_wait_s >= 0
    assert trial.peak_device_bytes is not None and trial.peak_allocated_bytes is not None
    assert trial.peak_device_bytes > trial.peak_allocated_bytes > 0
    assert list(scratch.iterdir()) == []
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_few_micro_batches_of_a_step_take_what_all_of_them_take(tiny_job: TrainJob, precision: Precision) -> None:
    candidate, found = replace(CANDIDATE, accumulation=7, precision=precision), []
    for some in (None, REHEARSED_MICRO_BATCHES):
        with Prepared(tiny_job, device="virtual", gpu=CARD, extent=Extent(micro_batches=some)) as prepared:
            found.append(prepared.run(candidate, timeout_s=200))
    whole, few = found
    assert whole.outcome == "ok", whole.message
    assert few == whole


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_card_that_is_not_here_is_stood_in_for(tiny_job: TrainJob) -> None:
    evaluating = with_raw(tiny_job, {**tiny_job.raw, "eval_strategy": "epoch"})
    trial = dry_run(evaluating, replace(CANDIDATE, precision="bf16"), device="virtual", gpu=CARD, context_bytes=200 * MIB, timeout_s=200)
    assert trial.outcome == "ok", trial.message
    assert trial.step_s is None and trial.data_wait_s is None
    assert trial.peak_allocated_bytes is not None and trial.peak_reserved_bytes is not None and trial.peak_device_bytes is not None
    assert trial.peak_allocated_bytes <= trial.peak_reserved_bytes == trial.peak_device_bytes - 200 * MIB
    assert trial.eval_peak_reserved_bytes is not None and trial.eval_peak_reserved_bytes > 0


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_packed_weights_are_rehearsed_with_their_scales(tiny_job: TrainJob) -> None:
    packed = replace(tiny_job.model, lora=Lora(target_modules="all-linear"), quantization=Quantization(bits=4, double_quant=True))
    trial = dry_run(replace(tiny_job, model=packed), replace(CANDIDATE, precision="bf16"), device="virtual", gpu=CARD, timeout_s=200)
    assert trial.outcome == "ok", trial.message
    assert trial.peak_allocated_bytes is not None and trial.peak_allocated_bytes > 0


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_memory_that_runs_out_is_an_outcome_not_an_error(tiny_job: TrainJob) -> None:
    large = replace(CANDIDATE, per_device_batch=4096, accumulation=1)
    small = replace(CARD, memory_bytes=GIB // 2)
    trial = dry_run(tiny_job, large, device="virtual", gpu=small, timeout_s=200)
    assert trial.outcome == "oom"
    assert trial.message is not None and trial.message.startswith("out of memory in the training steps, step 1: CUDA out of memory.")
    assert trial.peak_reserved_bytes is not None and trial.peak_reserved_bytes <= small.memory_bytes


@pytest.mark.slow
def test_a_model_that_cannot_be_built_is_told_in_one_sentence(tiny_job: TrainJob) -> None:
    trial = dry_run(replace(tiny_job, model=ModelSpec(name="./no-such-model")), CANDIDATE, device="cpu", timeout_s=200)
    assert trial.outcome == "error"
    assert trial.message is not None and "no-such-model" in trial.message and "\n" not in trial.message


def test_a_hanging_child_is_ended_at_the_limit(tiny_job: TrainJob, scratch: Path) -> None:
    trial = dry_run(tiny_job, CANDIDATE, device="cpu", timeout_s=0.3)
    assert (trial.outcome, trial.message) == ("timeout", "its time limit is 300.0 ms")
    assert _workers(scratch) == []
    assert list(scratch.iterdir()) == []


def _workers(scratch: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "hfopt.probe.dry_run_worker" in words and "-I" not in words and any(str(scratch) in word for word in words):
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("moment_s", [random.Random(seed).uniform(0, 4) for seed in range(3)])
def test_a_killed_child_leaves_a_message_and_nothing_else(moment_s: float, tiny_job: TrainJob, scratch: Path) -> None:
    def kill() -> None:
        while not (pids := _workers(scratch)):
            time.sleep(0.01)
        time.sleep(moment_s)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    trial = dry_run(tiny_job, CANDIDATE, device="cpu", timeout_s=100, steps=100_000)
    killer.join()
    assert trial.outcome == "error"
    assert trial.message is not None and trial.message.startswith("the dry run was killed (signal 9)")
    assert _workers(scratch) == []
    assert list(scratch.iterdir()) == []


def test_the_end_of_a_child_that_said_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Traceback\nImportError: no torch\n")
    died = module._how_it_died(child_process.Ended(reason="exit", returncode=1, wall_s=1), log)
    assert died == "the dry run ended with exit code 1: ImportError: no torch"
    assert "signal 11" in module._how_it_died(child_process.Ended(reason="exit", returncode=-11, wall_s=1), log)


def test_a_virtual_run_needs_a_card(tiny_job: TrainJob) -> None:
    with pytest.raises(DryRunError, match="which card"):
        dry_run(tiny_job, CANDIDATE, device="virtual")


def test_the_parent_stays_light() -> None:
    import subprocess

    code = "import sys, hfopt.probe.dry_run, hfopt.probe.rehearsal; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("moment_s", [0.0, 1.5])
def test_a_prepared_child_that_is_never_asked_leaves_nothing(moment_s: float, tiny_job: TrainJob, scratch: Path) -> None:
    prepared = module.Prepared(tiny_job, device="cpu")
    time.sleep(moment_s)
    prepared.close()
    assert _workers(scratch) == []
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
def test_a_prepared_child_is_told_later(tiny_job: TrainJob, scratch: Path) -> None:
    with module.Prepared(tiny_job, device="cpu") as prepared:
        time.sleep(0.5)
        trial = prepared.run(CANDIDATE, timeout_s=200)
    assert trial.outcome == "ok" and trial.candidate == CANDIDATE, trial.message
    assert list(scratch.iterdir()) == []
