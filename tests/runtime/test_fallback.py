"""A run that runs out of memory ends where the undisturbed one does: weights, step, learning rate, sample order, logged loss, counters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hfopt


def disturbed(lab: Any, too_small: Any, layer_of: Any, at: dict[tuple[int, int], tuple[str, int]], **settings: Any) -> tuple[Any, Any]:
    trainer = hfopt.protect(lab.trainer(**settings))
    memory = too_small(at=at)
    memory.watch(trainer, layer_of(trainer.model))
    trainer.train()
    return trainer, memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1], ids=["plain", "smoothed"])
@pytest.mark.parametrize("accumulation", [1, 8])
@pytest.mark.parametrize("task", ["causal", "sequence", "token", "seq2seq", "image"])
def test_the_run_is_the_same(
    lab: Any, too_small: Any, layer_of: Any, task: str, accumulation: int, smoothing: float, dtype: torch.dtype
) -> None:
    settings = {"task": task, "accumulation": accumulation, "batch": 6, "label_smoothing_factor": smoothing, "dtype": dtype, "max_steps": 2}
    undisturbed = lab.trainer(**settings)
    undisturbed.train()
    last = accumulation - 1
    trainer, memory = disturbed(lab, too_small, layer_of, {(0, last // 2): ("backward", 4), (1, last): ("forward", 2)}, **settings)
    assert [(step, phase) for step, _, phase, _ in memory.seen] == [(0, "backward"), (1, "forward"), (1, "forward")]
    lab.assert_same_run(trainer, undisturbed, 1e-6)
