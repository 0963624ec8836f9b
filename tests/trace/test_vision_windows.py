"""Windows of a vision tower as one batch: the same bytes, work and launches as one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hfopt.memory.step_memory import Estimate, estimate
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec, StepSettings
from hfopt.trace import cuda_choices as cuda_attention
from hfopt.trace.fake_tensors import FastFake

FAMILIES = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "tiny_families.json").read_text())


def _work(made: Estimate) -> tuple[float, float]:
    return sum(op.count for op in made.ops), sum(op.count * (op.flops_constant + 3 * op.flops_slope) for op in made.ops)


@pytest.mark.slow
def test_grouped_windows_cost_what_single_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen2_5_vl"]))
    workload = from_spec(ModelSpec(name=str(tmp_path)), DataSpec(image_size=560))
    settings = StepSettings(precision="bf16")
    grouped = estimate(workload, settings)
    monkeypatch.setattr(cuda_attention, "MANY", 10**9)
    single = estimate(workload, settings)
    assert len(grouped.curve.timeline) < 0.7 * len(single.curve.timeline), "hundreds of calls have become a few"
    assert grouped.curve.peak(3).allocated_bytes == pytest.approx(single.curve.peak(3).allocated_bytes, rel=0.003)
    assert grouped.curve.peak(3).reserved_bytes == pytest.approx(single.curve.peak(3).reserved_bytes, rel=0.02)
    assert _work(grouped) == pytest.approx(_work(single))


def test_a_few_pieces_stay_apart() -> None:
    with FakeTensorMode(), cuda_attention.grouped_windows():
        tokens = torch.empty(1, 4, 64, 8)
        few = torch.split(tokens, [32, 32], dim=2)
        assert len(few) == 2 and cuda_attention.windows_in(few[0]) == 1
        many = torch.split(tokens, [4] * 14 + [2] * 4, dim=2)
        assert [cuda_attention.windows_in(piece) for piece in many] == [14, 4]
        assert [piece.shape[2] for piece in many] == [56, 8]


def test_an_operation_that_returns_more_than_tensors_is_remembered() -> None:
    with FakeTensorMode() as mode:
        run, query = FastFake(mode), torch.empty(1, 4, 64, 32, dtype=torch.bfloat16)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        first = run(kernel, (query, query, query), {})
        mode.dispatch = None  # type: ignore[assignment,method-assign]
        again = run(kernel, (query, query, query), {})
    assert [getattr(one, "shape", one) for one in first] == [getattr(one, "shape", one) for one in again]
    assert 64 in again and None in again, "lengths and the absent mask among the tensors"
