"""A restarted process trains with other settings and learns the same: gradients and logged losses are those of the script's own pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerState

from hfopt.compat import versions
from hfopt.compat.transformers_patches import checkpoint_batch
from hfopt.launch import attach
from hfopt.launch.handoff import ORDERS, RestartOrders
from hfopt.oom.protect import guard_of


@pytest.fixture
def restarted(lab: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a Trainer as one is made in a process that `hfopt run` started again with 4 × 4 instead of 8 × 2."""

    class Own(Trainer):  # type: ignore[misc]
        """So that the class all tests use stays as it is."""

    def make(**run: Any) -> Any:
        folder = run.get("output_dir", str(lab.folder / "out"))
        changes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
        monkeypatch.setenv(ORDERS, json.dumps({"output_dir": folder, "checkpoint": None, "changes": changes}))
        return lab.trainer(kind=Own, **run)

    attach.install(Own)
    return make


@pytest.mark.parametrize(("task", "smoothing"), [("causal", 0.0), ("sequence", 0.0), ("sequence", 0.1), ("image", 0.0), ("image", 0.1)])
def test_the_same_is_learned_with_the_new_pair(lab: Any, restarted: Any, task: str, smoothing: float) -> None:
    """Heads that ignore the number of items make gradients n times as large for n micro-batches; here they must not grow.

    Not among them: means over each micro-batch's own labels, of which rows have different numbers; those are other means for another pair.
    """
    run = {"task": task, "label_smoothing_factor": smoothing, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}
    undisturbed = lab.trainer(**run)
    undisturbed.train()
    trainer = restarted(**run)
    trainer.train()
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (4, 4)
    for one in (trainer, undisturbed):
        del one.train_dataset.order[4 * 16 :]  # the loader is one micro-batch ahead, of whichever size
    lab.assert_same_run(trainer, undisturbed)


def test_orders_are_for_the_run_that_failed_only(restarted: Any, lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarted(task="causal")
    monkeypatch.setenv(ORDERS, json.dumps({"output_dir": str(tmp_path / "another"), "checkpoint": "x", "changes": {"seed": 1}}))
    assert RestartOrders.here(str(lab.folder / "out")) is None
    assert RestartOrders.here(str(tmp_path / "another")) is not None


def test_a_run_that_was_not_restarted_keeps_every_scale(lab: Any, restarted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = restarted(task="sequence")
    monkeypatch.delenv(ORDERS)
    plain = type(trainer)(model=trainer.model, args=lab.trainer(task="sequence").args, train_dataset=trainer.train_dataset)
    plain.train()
    guard = guard_of(plain)
    assert guard is not None and guard.scripts_accumulation is None and guard.pieces.scale == 1.0
    assert torch.isfinite(torch.tensor(plain.state.log_history[0]["loss"]))


@pytest.mark.parametrize(("version", "batch"), [("5.1.0", 4), ("5.2.0", 8)])
def test_before_5_2_the_checkpoints_batch_is_read_as_the_new_one(
    version: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the size that a checkpoint states would win over the one asked for."""
    saved = tmp_path / "trainer_state.json"
    TrainerState(train_batch_size=8).save_to_json(str(saved))
    monkeypatch.setattr(versions, "package_version", lambda name: version)
    with checkpoint_batch(4):
        assert TrainerState.load_from_json(str(saved)).train_batch_size == batch
    assert TrainerState.load_from_json(str(saved)).train_batch_size == 8
