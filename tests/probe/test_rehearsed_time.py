"""The step time of a rehearsed script: from journals written by hand, and from scripts on the virtual GPU."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from hfopt.hardware.detect import named
from hfopt.memory.step_memory import estimate
from hfopt.model.from_config import from_spec
from hfopt.probe.rehearsal import rehearse
from hfopt.probe.rehearsed_time import rehearsed_time, step_clock
from hfopt.schema import DataSpec, Gpu, ModelSpec, RehearsedTime, StepSettings
from hfopt.speed.device_speed import speed_of
from hfopt.speed.step_time import StepTimer
from hfopt.units import GIB

CARD = named("a100-80gb").gpus[0]
SCALE = (10 * 20 + 20 * 12) / (10 * 60 + 20 * 24)
"""Of the journals below: what their launches of forward and backward take by the table, over what they took."""


class Writer:
    """Lines of a journal, with a clock of CPU time in microseconds."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cpu_us = 0.0

    def add(self, kind: str, *fields: object, after_us: float = 0.0, op: int = 0) -> None:
        self.cpu_us += after_us
        self.lines.append("\t".join(map(str, (kind, 0, round(self.cpu_us * 1000), op, 0, *fields))))

    def step(self, number: int, *facts: str) -> None:
        self.add("step", number, *facts)
        self.add("phase", "between")

    def kernels(self, phase: str, count: int, *, each_us: float, first: int, work_us: float = 0.0, bytes_each: float = 1e8) -> None:
        self.add("phase", phase)
        for index in range(count):
            self.add("kernel", 0, "1,1,1", "128,1,1", -1, after_us=each_us + (work_us if index == 1 else 0), op=first + index)
            self.add("op", "mul", "elementwise", "float32", 1.0, bytes_each, 1, "", op=first + index)

    def write(self, folder: Path, pid: int = 7) -> None:
        (folder / f"journal-{pid}.tsv").write_text("\n".join(self.lines) + "\n")


def written(*, work_us: float = 0.0, bytes_each: float = 1e8, facts: tuple[str, ...] = (), host_step: bool = True) -> Writer:
    journal = Writer()
    journal.step(1, *facts)
    for number in (2, 3) if host_step else (2,):
        slower = 1 if number == 3 else 5  # the step with operations is no measure of the host
        journal.kernels("forward", 10, each_us=60 * slower, first=1, work_us=work_us, bytes_each=bytes_each)
        journal.kernels("backward", 20, each_us=24 * slower, first=11, bytes_each=bytes_each)
        journal.add("sync", "value")
        journal.kernels("optimizer", 5, each_us=26, first=31, bytes_each=bytes_each)
        journal.step(number, *facts)
    return journal


def timed(folder: Path, journal: Writer, gpu: Gpu = CARD) -> RehearsedTime:
    journal.write(folder)
    found = rehearsed_time(folder, gpu, [{"pid": 7, "micro_batch": 4, "accumulation": 2, "world_size": 1}])
    assert found is not None
    return found


def test_a_busy_card_takes_what_its_kernels_take(tmp_path: Path) -> None:
    found = timed(tmp_path, written())
    speed = speed_of(CARD)
    assert speed is not None
    kernel_s = 1e8 / speed.memory_bytes_per_s
    assert found.busy_s == pytest.approx(35 * kernel_s, rel=1e-6)
    assert found.step_s == pytest.approx(found.busy_s + sum(found.idle_s.values()), rel=1e-6)
    assert [(phase.phase, phase.launches) for phase in found.phases] == [("forward", 10), ("backward", 20), ("optimizer", 5)]
    assert found.samples_per_s == pytest.approx(8 / found.step_s)
    assert found.host_scale == pytest.approx(SCALE, rel=1e-3)


def test_small_kernels_wait_for_a_host_of_the_table_however_slow_this_one_is(tmp_path: Path) -> None:
    found = timed(tmp_path, written(bytes_each=10.0))
    speed = speed_of(CARD)
    assert speed is not None
    host = speed.host
    launches_s = 10 * host.forward_s + 20 * host.backward_s + 5 * host.optimizer_s
    assert found.step_s == pytest.approx(launches_s + host.sync_s, rel=0.02)
    assert max(found.idle_s, key=lambda cause: found.idle_s[cause]) == "launch"


def test_the_scripts_own_python_is_scaled_and_counted(tmp_path: Path) -> None:
    plain, slow = timed(tmp_path, written(bytes_each=10.0)), timed(tmp_path, written(bytes_each=10.0, work_us=50_000))
    assert slow.host_scale == pytest.approx(SCALE, rel=0.02)  # the launch behind it does not count
    assert slow.step_s - plain.step_s == pytest.approx(0.05 * SCALE, rel=0.02)
    assert slow.idle_s["python"] == pytest.approx(0.05 * SCALE, rel=0.05)


def test_a_models_own_python_between_launches_is_part_of_launching(tmp_path: Path) -> None:
    plain, slower = timed(tmp_path, written(bytes_each=10.0)), timed(tmp_path, written(bytes_each=10.0, work_us=1_000))
    assert slower.host_scale is not None and plain.host_scale is not None and slower.host_scale < plain.host_scale
    assert slower.step_s == pytest.approx(plain.step_s, rel=1e-6)


def test_a_run_too_short_for_the_hosts_time_says_so(tmp_path: Path) -> None:
    assert timed(tmp_path, written(host_step=False)).host_scale is None


def test_workers_that_need_longer_than_the_step_set_its_pace(tmp_path: Path) -> None:
    (tmp_path / "fetch-9.txt").write_text("2.0\n2.0\n")
    found = timed(tmp_path, written(facts=("workers=4", "micro_batches=2")))
    assert found.step_s == pytest.approx(2.0 * SCALE * 2 / 4, rel=1e-3)  # scaled to the table's host, two batches by four workers
    assert found.idle_s["input"] > 0.25


def test_ranks_wait_for_the_slowest_as_a_trace_says(tmp_path: Path) -> None:
    def with_ranks(ranks: int) -> RehearsedTime:
        journal = written()
        at = next(index for index, line in enumerate(journal.lines) if line.startswith("sync"))
        journal.lines.insert(at, f"nccl\t0\t{round(journal.cpu_us * 1000)}\t0\t1\tall_reduce\t{ranks}\t1000")
        return timed(tmp_path, journal)

    two, eight = with_ranks(2), with_ranks(8)
    assert eight.step_s / two.step_s == pytest.approx((1 + 0.015 * 1.42) / (1 + 0.015 * 0.59), abs=0.002)
    assert sum(phase.wall_s for phase in eight.phases) == pytest.approx(eight.step_s)
    assert eight.idle_s["communication"] > two.idle_s["communication"]


def test_no_step_or_a_card_of_unknown_speed_has_no_time(tmp_path: Path) -> None:
    empty = Writer()
    empty.step(1)
    empty.write(tmp_path)
    assert rehearsed_time(tmp_path, CARD, []) is None
    written().write(tmp_path)
    assert rehearsed_time(tmp_path, Gpu(name="unknown", memory_bytes=GIB), []) is None


def test_the_clock_of_a_step_knows_each_launch_and_ends_with_the_step(tmp_path: Path) -> None:
    found, speed = timed(tmp_path, written()), speed_of(CARD)
    clock = step_clock(tmp_path, "7", CARD)
    assert clock is not None and speed is not None
    pairs = list(zip(clock["times_ns"][::2], clock["times_ns"][1::2], strict=True))
    # the visits: nothing before the first phase, between, forward, backward, optimizer; one more time than launches in each
    assert [b - a for a, b in zip(clock["starts"], clock["starts"][1:], strict=False)] == [1, 1, 11, 21, 6]
    host, card = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    assert host == sorted(host) and card == sorted(card) and all(there >= here for here, there in pairs)
    assert host[3] == pytest.approx(1e9 * speed.host.forward_s, rel=1e-3)
    assert clock["step_ns"] == pytest.approx(1e9 * found.step_s, rel=1e-6)
    assert step_clock(tmp_path, "8", CARD) is None


# ---------------------------------------------------------------------------------------------- on the virtual GPU

TRAINER_SCRIPT = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
ids = torch.arange(64)
rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)} for i in range(2000)]
args = TrainingArguments("out", max_steps=9, per_device_train_batch_size=64, report_to=[], disable_tqdm=True, optim="adamw_torch_fused")
Trainer(model=BertForSequenceClassification(BertConfig(num_hidden_layers=4)), args=args, train_dataset=rows).train()
"""
LOOP_SCRIPT = """
import json, time
import torch
model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(10):
    begun, event = time.perf_counter(), torch.cuda.Event(enable_timing=True)
    event.record()
    model(torch.zeros(4096, 4096, device="cuda")).sum().backward()
    done = torch.cuda.Event(enable_timing=True)
    done.record()
    queued = time.perf_counter() - begun
    torch.cuda.synchronize()
    waited = time.perf_counter() - begun
    if step:
        time.sleep(0.25)
        print("seen", json.dumps([queued, waited, event.elapsed_time(done) / 1e3, time.perf_counter() - begun]))
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> list[str]:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return [sys.executable, str(tmp_path / "train.py")]

    return write


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_trainer_script_takes_what_its_trace_says_and_the_memory_it_takes_untimed(
    script: Callable[[str], list[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers import BertConfig

    command = script(TRAINER_SCRIPT)
    seen = rehearse(command, CARD, timed=True)
    assert seen.time is not None, seen.message
    BertConfig(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    speed = speed_of(CARD)
    assert CARD.capability is not None and speed is not None
    workload = from_spec(ModelSpec(name=str(tmp_path / "model"), task="sequence_classification"), DataSpec(max_length=64))
    settings = StepSettings(optim="adamw_torch_fused", capability=CARD.capability, multiprocessors=CARD.sms)
    traced = StepTimer(estimate(workload, settings).ops, speed, "fp32").at(64)
    assert seen.time.busy_s == pytest.approx(traced.busy_s, rel=0.05)
    logged = re.search(r"'train_samples_per_second': '?([\d.]+)", capfd.readouterr().err)
    assert logged is not None and float(logged[1]) == pytest.approx(seen.time.samples_per_s, rel=0.05)
    assert {phase.phase for phase in seen.time.phases} >= {"forward", "backward", "optimizer"}
    assert sum(phase.wall_s for phase in seen.time.phases) == pytest.approx(seen.time.step_s)
    untimed = rehearse(command, CARD)
    assert untimed.time is None
    assert untimed.phases == seen.phases


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_script_without_a_trainer_is_timed_by_its_optimizer(
    script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    seen = rehearse(script(LOOP_SCRIPT), CARD, timed=True)
    assert seen.time is not None, seen.message
    speed = speed_of(CARD)
    assert speed is not None
    products_s = 5 * 2 * 4096**3 / speed.matmul_flops["fp32"]  # two forward, three backward
    assert products_s < seen.time.busy_s < 1.25 * products_s
    phases = {phase.phase: phase for phase in seen.time.phases}
    assert phases["backward"].busy_s == pytest.approx(1.5 * phases["forward"].busy_s, rel=0.1)
    assert phases["optimizer"].launches >= 1
    assert seen.time.samples_per_s is None
    # its own clock: of the step after those that hfopt had to see, which is the last
    queued, waited, between_events, slept = json.loads(re.findall(r"^seen (.*)$", capfd.readouterr().err, re.MULTILINE)[-1])
    kernels_s = phases["forward"].busy_s + phases["backward"].busy_s
    assert queued < 0.2 * waited
    assert waited == pytest.approx(kernels_s, rel=0.1)
    assert between_events == pytest.approx(kernels_s, rel=0.1)
    assert slept - waited == pytest.approx(0.25, abs=0.001)


@pytest.mark.virtual_gpu
def test_a_model_that_the_script_compiles_has_no_time_and_it_says_so_before_the_first_step(
    script: Callable[[str], list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    compiled = LOOP_SCRIPT.replace("optimizer =", "model = torch.compile(model, backend='eager')\noptimizer =")
    seen = rehearse(script(compiled), CARD, timed=True)
    assert seen.time is None
    said = "torch.compile: the time of compiled code is not predicted"
    assert said in seen.notes
    told = capfd.readouterr().err
    assert told.index(said) < told.index("seen [")
