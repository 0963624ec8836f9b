"""Training scripts on a card that is not there: what fits, what does not, and whatever else a script may do."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hfopt.errors import VirtualGpuError
from hfopt.hardware import catalog
from hfopt.probe import rehearsal
from hfopt.probe.rehearsal import normal_command, rehearse
from hfopt.process import child_process
from hfopt.schema import Gpu
from hfopt.units import GIB, MIB

TRAINER_SCRIPT = """
import sys, torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        ids = torch.arange(32) + i
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(i % 2)}

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
config = BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
trainer = Trainer(model=BertForSequenceClassification(config), args=args, train_dataset=Data(), eval_dataset=Data())
trainer.train()
trainer.save_model("final")
open("reached the end", "w").close()
"""

LOOP_SCRIPT = """
import sys, torch
size = int(sys.argv[1])
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[2])):
    model(torch.zeros(size, 1024, device="cuda")).relu().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
open("reached the end", "w").close()
"""


@pytest.fixture
def card() -> Gpu:
    return Gpu(name="Virtual A10", memory_bytes=2 * GIB, capability=(8, 6), sms=72)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return str(tmp_path / "train.py")

    return write


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_trainer_script_is_followed_and_leaves_no_trace(script: Callable[[str], str], card: Gpu, tmp_path: Path) -> None:
    options = ["--output_dir", "out", "--gradient_accumulation_steps", "2", "--dataloader_num_workers", "1", "--report_to", "tensorboard"]
    seen = rehearse([sys.executable, script(TRAINER_SCRIPT), *options], card, steps=2, context_bytes=200 * MIB, timeout_s=120)
    assert (seen.outcome, seen.steps_done, seen.script_exit_code) == ("fits", 2, None), seen.message
    assert [phase.phase for phase in seen.phases] == [
        "model load",
        "step 1: forward",
        "step 1: backward",
        "step 1: optimizer",
        "later steps",
        "evaluation",
        "saving",
    ]
    by_name = {phase.phase: phase for phase in seen.phases}
    assert by_name["step 1: optimizer"].allocated_bytes > 2 * by_name["model load"].allocated_bytes  # Adam's state
    assert all(phase.reserved_bytes >= phase.allocated_bytes for phase in seen.phases)
    assert seen.peak is not None and seen.peak.reserved_bytes < seen.capacity_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_bf16_on_a_t4_is_said_to_be_unsupported_and_ranks_are_counted(script: Callable[[str], str], tmp_path: Path) -> None:
    t4 = Gpu(name="Tesla T4", memory_bytes=15 * GIB, capability=(7, 5), sms=40)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launcher, script(TRAINER_SCRIPT), "--output_dir", "out", "--bf16", "True"]
    seen = rehearse(command, t4, count=2, steps=1, timeout_s=180)
    assert seen.outcome == "unsupported", seen.message
    assert seen.ranks == 2
    assert "no bf16 tensor cores" in seen.findings[0]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


TENSOR_PARALLEL_SCRIPT = """
import sys, torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
model = LlamaForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto")
arguments = TrainingArguments(output_dir="out", save_strategy="no", report_to=[], disable_tqdm=True, per_device_train_batch_size=2)
row = {"input_ids": torch.arange(16), "labels": torch.arange(16)}
Trainer(model=model, args=arguments, train_dataset=[row] * 16).train()
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_model_split_over_two_ranks_is_followed(
    script: Callable[[str], str], card: Gpu, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    seen = rehearse([*launcher, script(TENSOR_PARALLEL_SCRIPT), str(folder)], card, count=2, steps=2, timeout_s=180)
    assert (seen.outcome, seen.ranks, seen.steps_done) == ("fits", 2, 2), seen.message


ODD_SCRIPT = (
    TRAINER_SCRIPT.partition("(args,) =")[0]
    + """
import hfopt_rehearsal_files
hfopt_rehearsal_files._MOST_CHECKPOINT_BYTES = 1000
args = TrainingArguments(output_dir="out", eval_strategy="steps", eval_steps=1, save_steps=1, report_to=[]) if "args" in sys.argv else None
def metrics(prediction):
    raise ZeroDivisionError("no positives")
config = BertConfig(vocab_size=2000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512)
held_out = Data() if "args" in sys.argv else None
model = BertForSequenceClassification(config).bfloat16()
trainer = Trainer(model=model, args=args, train_dataset=Data(), eval_dataset=held_out, compute_metrics=metrics)
if "fails" in sys.argv:
    trainer.compute_loss = lambda *_, **__: torch.empty(2**40, device="cuda")
trainer.train()
"""
)


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_metric_that_chokes_and_a_checkpoint_that_is_too_large_are_notes(script: Callable[[str], str], card: Gpu, tmp_path: Path) -> None:
    seen = rehearse([sys.executable, script(ODD_SCRIPT), "args"], card, steps=1, timeout_s=300)
    assert seen.outcome == "fits", seen.message
    assert any("the evaluation raised ZeroDivisionError: no positives" in note for note in seen.notes)
    assert any("its tensors were not written" in note for note in seen.notes)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_trainer_without_arguments_and_one_that_runs_out(script: Callable[[str], str], card: Gpu, tmp_path: Path) -> None:
    path = script(ODD_SCRIPT)
    seen = rehearse([sys.executable, path], replace(card, capability=(7, 5)), steps=1, timeout_s=300)
    assert seen.outcome == "unsupported" and "bf16" in seen.findings[0], seen.message
    assert any("no evaluation set" in note for note in seen.notes)
    seen = rehearse([sys.executable, path, "fails"], card, steps=1, timeout_s=300)
    assert (seen.outcome, seen.oom_step) == ("oom", 1), seen.message
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.virtual_gpu
def test_a_script_without_a_trainer_is_followed_by_its_optimizer(script: Callable[[str], str], card: Gpu, tmp_path: Path) -> None:
    seen = rehearse([script(LOOP_SCRIPT), "1000", "100"], card, steps=2, timeout_s=120)
    assert (seen.outcome, seen.steps_done) == ("fits", 2), seen.message
    assert [phase.phase for phase in seen.phases] == ["step 1: forward and backward", "step 1: optimizer", "later steps"]
    assert "no Trainer" in seen.notes[0]
    assert not (tmp_path / "reached the end").exists()


@pytest.mark.virtual_gpu
def test_running_out_of_memory_is_told_with_its_step(script: Callable[[str], str], card: Gpu) -> None:
    seen = rehearse([sys.executable, script(LOOP_SCRIPT), "1000000", "5"], card, steps=3, timeout_s=120)
    assert (seen.outcome, seen.steps_done, seen.script_exit_code) == ("oom", 0, 1)
    assert seen.message.startswith("out of memory in model load or the first step: CUDA out of memory. Tried to allocate 3.82 GiB.")


@pytest.mark.virtual_gpu
def test_a_script_that_ends_early_is_not_called_a_success(script: Callable[[str], str], card: Gpu) -> None:
    seen = rehearse([sys.executable, script(LOOP_SCRIPT), "10", "1"], card, steps=3, timeout_s=120)
    assert (seen.outcome, seen.script_exit_code) == ("incomplete", 0)
    assert seen.message == "the script ended by itself after 1 of 3 optimizer steps"


@pytest.mark.virtual_gpu
def test_a_script_that_fails_passes_its_code_on(script: Callable[[str], str]) -> None:
    path = script("import sys\nsys.exit(7)")
    command = [sys.executable, "-m", "hfopt", "rehearse", "--gpu", "A10", "--json", "--", sys.executable, path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 7
    assert json.loads(done.stdout)["outcome"] == "failed"
    assert "the script itself failed with exit code 7" in done.stderr


@pytest.mark.virtual_gpu
def test_a_card_without_kernels_in_the_scripts_torch_is_one_line(script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The script would end in a traceback at its first kernel; it is not even started."""
    torch = rehearsal.find_toolchain().torch
    monkeypatch.setattr(rehearsal, "find_toolchain", lambda python: SimpleNamespace(torch=replace(torch, version="2.15.0", cuda="13.2")))
    started = Path(script("")).with_name("started")
    seen = rehearse([sys.executable, script(f"open({str(started)!r}, 'w')")], catalog.find("gtx 1080"))
    assert (seen.outcome, seen.wall_s, started.exists()) == ("unsupported", None, False)
    assert "torch 2.15.0 (CUDA 13.2) has no kernels for GeForce GTX 1080 (capability 6.1)" in seen.message and "cu126" in seen.message


@pytest.mark.virtual_gpu
def test_a_hanging_script_and_its_workers_are_ended(script: Callable[[str], str], card: Gpu) -> None:
    path = script("import os, time\nos.fork()\ntime.sleep(600)")
    seen = rehearse([sys.executable, path], card, timeout_s=1)
    assert seen.outcome == "timeout"
    assert seen.wall_s is not None and 1 <= seen.wall_s < 300


def _report(**changes: Any) -> dict[str, Any]:
    phases = {"model load": {"allocated": 5, "reserved": 6, "device": 0, "part": ""}}
    base = {"phases": phases, "steps_done": 3, "done": True, "asks": [], "notes": [], "oom": None, "survived_ooms": 0, "error": None}
    return base | {"rank": 0, "world_size": 1} | changes


def _judged(reports: list[dict[str, Any]], gpu: Gpu, reason: Any = "exit", returncode: int = 0) -> Any:
    ended = child_process.Ended(reason=reason, returncode=returncode, wall_s=1.0)
    return rehearsal._judge(ended, reports, rehearsal.Rehearsal(**rehearsal._frame(gpu, 1, 0, reports)), 3, 10.0)


def test_an_out_of_memory_error_on_any_rank_counts(card: Gpu) -> None:
    oom = {"phase": "later steps", "part": "backward", "step": 2, "message": "CUDA out of memory."}
    seen = _judged([_report(), _report(rank=1, oom=oom, done=False)], card, returncode=1)
    assert (seen.outcome, seen.oom_step) == ("oom", 2)
    assert seen.message == "out of memory at step 2, later steps (backward): CUDA out of memory."


def test_an_error_the_script_survived_is_a_note(card: Gpu) -> None:
    seen = _judged([_report(survived_ooms=1)], card)
    assert seen.outcome == "fits"
    assert "carried on by itself" in seen.notes[0]


def test_an_evaluation_that_grows_beyond_the_card_is_foreseen(card: Gpu) -> None:
    whole = {"batches": 1000, "run": 8, "growth": 3 * MIB, "allocated": 6 * GIB}
    seen = _judged([_report(evaluation=whole)], card)
    assert (seen.outcome, seen.oom_phase) == ("oom", "evaluation")
    assert "eval_accumulation_steps" in seen.message
    assert _judged([_report(evaluation=whole | {"allocated": GIB})], card).outcome == "fits"


def test_a_killed_script_is_told_from_a_failed_one(card: Gpu) -> None:
    assert "signal 11" in _judged([], card, returncode=-11).message
    failed = _judged([_report(done=False, error="ValueError: --tf32 requires Ampere")], card, returncode=1)
    assert failed.message == "the script itself failed with exit code 1: ValueError: --tf32 requires Ampere"


def test_a_script_that_never_touched_the_card_has_not_fitted_it(card: Gpu) -> None:
    seen = _judged([_report(phases={})], card)
    assert seen.outcome == "incomplete"
    assert "trained on the CPU" in seen.message


def test_the_interpreter_behind_an_entry_point_is_found(tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text("#!/opt/env/bin/python3.11\n")
    launcher.chmod(0o755)
    shell = tmp_path / "run"
    shell.write_text("#!/bin/sh\n")
    shell.chmod(0o755)
    assert rehearsal._interpreter([str(launcher)]) == "/opt/env/bin/python3.11"
    assert rehearsal._interpreter([str(shell)]) is None
    assert rehearsal._interpreter([sys.executable]) == sys.executable


def test_commands_are_completed_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.touch()
    assert normal_command([str(path), "--x"]) == [sys.executable, str(path), "--x"]
    assert normal_command(["-m", "json.tool"]) == [sys.executable, "-m", "json.tool"]
    with pytest.raises(VirtualGpuError, match="no such script: nowhere"):
        normal_command([sys.executable, "nowhere.py"])
    with pytest.raises(VirtualGpuError, match="cannot run torchrunn"):
        normal_command(["torchrunn", "x.py"])
    with pytest.raises(VirtualGpuError, match="no script"):
        normal_command([])
