"""The plan's memory curve reaches the fallback: from `hfopt run`, after a restart, and by `protect(trainer, plan=...)`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfopt
from hfopt.launch.handoff import ORDERS
from hfopt.oom import next_settings
from hfopt.oom.next_settings import MemoryNow
from hfopt.oom.protect import guard_of
from hfopt.oom.step_down import next_size
from hfopt.schema import Candidate, OomSeen, PlannedMemory
from hfopt.units import MIB

pytestmark = pytest.mark.usefixtures("desk")
Curve = Callable[[], PlannedMemory]
REPEATED = [8, 2, 1, 1, 4, 4]
"""The batch that failed, two samples compared with each of them, and the pieces by the curve."""


class LongSamples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A sample's logits are 4 MiB, so that the curve is steep beside the allocator's 2 MiB."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 4096, (256,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer_in(folder: Path) -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    return Trainer(model=LlamaForCausalLM(LlamaConfig(vocab_size=4096, **shape)), args=args, train_dataset=LongSamples())


def figures(curve: PlannedMemory) -> tuple[int, int, int]:
    """Allocated, asked for, capacity: by the straight line through what stays, pieces of 2; by the curve, which begins near nothing, 4."""
    peak = curve(Candidate(per_device_batch=8, accumulation=1, precision="fp32"))
    assert peak is not None
    return int(0.9 * peak.reserved_bytes), -(-int(0.3 * peak.reserved_bytes) // MIB) * MIB, peak.reserved_bytes


def run_out(trainer: Any, curve: Curve, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory runs out at 8 samples; the sizes that were tried."""
    tried: list[int] = []

    def read(device: torch.device) -> MemoryNow:
        allocated, _, capacity = figures(curve())
        return MemoryNow(allocated_bytes=allocated, reserved_bytes=capacity, capacity_bytes=capacity)

    def fail(module: torch.nn.Module, args: tuple[torch.Tensor, ...], more: Any) -> None:
        if not module.training:
            return
        tried.append(int(args[0].shape[0]))
        if tried[-1] == 8:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {figures(curve())[1] // MIB}.00 MiB.")

    fail.__module__ = "torch"  # an instrument: what it counts is nothing that a script keeps
    monkeypatch.setattr(next_settings, "memory_now", read)
    trainer.model.model.layers[0].register_forward_pre_hook(fail, with_kwargs=True)
    trainer.train()
    return tried


def chosen(folder: Path) -> int:
    return int(yaml.safe_load((folder / "config_replanned.yaml").read_text())["per_device_train_batch_size"])


def test_the_figures_of_these_tests_tell_the_curve_from_the_straight_line(tmp_path: Path) -> None:
    curve = hfopt.plan(trainer_in(tmp_path), keep=frozenset({"per_device_train_batch_size", "bf16"})).memory
    assert curve is not None
    allocated, asked, capacity = figures(curve)
    seen = OomSeen(
        phase="forward",
        step=0,
        micro_batch=8,
        allocated_bytes=allocated,
        requested_bytes=asked,
        capacity_bytes=capacity,
        baseline_bytes=allocated,
    )
    failed = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    assert next_size(failed, seen)[0] == 2
    size, reason = next_size(failed, seen, curve)
    assert size == 4 and "by the plan's memory curve" in reason
    assert PlannedMemory.from_json(json.loads(json.dumps(curve.to_json()))) == curve


def test_hfopt_run_hands_the_curve_to_the_fallback(tmp_path: Path, attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def curve() -> PlannedMemory:
        return PlannedMemory.from_json(json.loads((tmp_path / "hfopt" / "plan.json").read_text())["memory_curve"])

    with attached(keep=("per_device_train_batch_size", "bf16")):
        tried = run_out(trainer_in(tmp_path), curve, monkeypatch)
    assert tried[-6:] == REPEATED  # what the planner traced stands before
    assert chosen(tmp_path) == 4


def test_a_restarted_run_has_the_curve_of_its_first_start(tmp_path: Path, attached: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(keep=("per_device_train_batch_size", "bf16")):
        trainer_in(tmp_path).train()
        monkeypatch.setenv(ORDERS, json.dumps({"output_dir": str(tmp_path), "checkpoint": None, "changes": {}}))
        again = trainer_in(tmp_path)
        again.train()
    guard = guard_of(again)
    assert guard is not None and isinstance(guard.fit.memory, PlannedMemory)
    assert guard.fit.memory(Candidate(per_device_batch=2, accumulation=4, precision="fp32")) is not None


@pytest.mark.parametrize("before", [True, False])
def test_a_plan_given_to_protect_is_used(tmp_path: Path, before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path)
    if before:
        hfopt.protect(trainer)  # a plan may come later
    plan = hfopt.plan(trainer, keep=frozenset({"per_device_train_batch_size", "bf16"}))
    assert plan.memory is not None
    hfopt.protect(trainer, plan=plan)
    memory = plan.memory
    assert run_out(trainer, lambda: memory, monkeypatch) == REPEATED
    assert chosen(tmp_path) == 4
