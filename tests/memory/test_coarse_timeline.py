"""A model that does different things at different batch sizes gets a line through two peaks, labelled as what it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hfopt.memory.step_memory import TRACED_BATCHES, estimate
from hfopt.schema import BatchShape, StepSettings, Workload
from hfopt.units import MIB


class _Moody(nn.Module):
    """An odd batch takes another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.wide(x) if x.shape[0] % 2 == 0 else self.wide(self.deep(x).relu())
        return {"loss": (hidden - labels).square().mean()}


def _batch(size: int) -> dict[str, Any]:
    return {"x": torch.zeros(size, 256, 512), "labels": torch.zeros(size, 256, 512)}


@pytest.fixture
def moody() -> Workload:
    return Workload(
        name="moody",
        model_class="Moody",
        task="custom",
        build_model=_Moody,
        make_batch=_batch,
        shape=BatchShape(kind="custom"),
        parameters=0,
        trainable_parameters=0,
    )


def test_the_line_is_labelled_and_grows_with_the_batch(moody: Workload) -> None:
    found = estimate(moody, StepSettings())
    assert any("coarse" in note and "batch 2 and 3" in note for note in found.notes)
    small, large = found.curve.peak(8), found.curve.peak(64)
    one_input = 256 * 512 * 4
    assert large.allocated_bytes - small.allocated_bytes >= 56 * 2 * one_input
    assert large.breakdown is not None and large.breakdown.total_bytes == large.device_bytes
    assert {op.phase for op in found.ops} == {"forward", "backward", "optimizer"}


def test_at_a_traced_size_the_line_is_the_trace(moody: Workload) -> None:
    batch = TRACED_BATCHES[0]

    class Even(_Moody):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.wide(x) - labels).square().mean()}

    from dataclasses import replace

    exact = estimate(replace(moody, build_model=Even), StepSettings()).curve.peak(batch)
    coarse = estimate(moody, StepSettings()).curve.peak(batch)
    assert coarse.reserved_bytes == pytest.approx(exact.reserved_bytes, abs=20 * MIB)
