"""A deep model from two shallow ones: the same memory, the same arithmetic and the same verdicts as its own trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hfopt.memory.layer_extrapolation import LEAST_LAYERS, DepthCurve, _carried_peak, _Phases, deeper_ops, share_of, traced_depths
from hfopt.memory.step_memory import estimate, traced
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec, OpCost, Sharding, StepSettings, Workload, ZeroSizes

SIZES = ZeroSizes(reduce_bucket=512 * 512, prefetch_bucket=512 * 512)
SHARDED = StepSettings(precision="bf16", sharding=Sharding(engine="zero2", world_size=4, zero=SIZES), optim="adamw_torch")


def llama(folder: Path, layers: int) -> Workload:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers, "dtype": "float32", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return from_spec(ModelSpec(name=str(folder)), DataSpec(max_length=64))


@pytest.mark.slow
def test_memory_and_arithmetic_are_those_of_the_deep_trace(tmp_path: Path) -> None:
    workload = llama(tmp_path, LEAST_LAYERS)
    carried, own = estimate(workload, SHARDED), traced(workload, SHARDED)
    assert isinstance(carried.curve, DepthCurve)
    for batch in (1, 16, 64):
        ours, real = carried.curve.peak(batch), own.curve.peak(batch)
        assert ours.allocated_bytes == pytest.approx(real.allocated_bytes, rel=0.02)
        assert ours.reserved_bytes == pytest.approx(real.reserved_bytes, rel=0.08)
        assert ours.breakdown is not None and ours.breakdown.total_bytes == ours.device_bytes
    flops = [sum(op.count * (op.flops_constant + 16 * op.flops_slope) for op in made.ops) for made in (carried, own)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-6)
    budget = own.curve.peak(64).device_bytes
    ours_limit, real_limit = carried.curve.largest_batch(budget), own.curve.largest_batch(budget)
    assert ours_limit is not None and real_limit is not None
    assert abs(ours_limit - real_limit) <= 0.1 * real_limit
    whole = carried.curve.replay(64)
    sizes = (whole.allocated_bytes - 1, whole.allocated_bytes, (whole.allocated_bytes + whole.reserved_bytes) // 2, whole.reserved_bytes)
    verdicts = [carried.curve.replay(64, capacity_bytes=size).fits for size in sizes]
    assert verdicts == sorted(verdicts) and not verdicts[0] and verdicts[-1], "the more room, the sooner it fits"
    assert verdicts[2] == (carried.curve._least[64] <= sizes[2]) and sizes[1] <= carried.curve._least[64] <= sizes[3]
    for quick, batch in zip(carried.curve.peaks((16, 64)), (16, 64), strict=True):
        assert quick.allocated_bytes == pytest.approx(carried.curve.peak(batch).allocated_bytes, rel=0.03)


def test_shallow_models_are_traced_as_they_are(tmp_path: Path) -> None:
    assert traced_depths(llama(tmp_path, LEAST_LAYERS - 1)) is None
    deep = llama(tmp_path, LEAST_LAYERS)
    assert traced_depths(deep) is not None
    assert traced_depths(replace(deep, parameters=deep.parameters + 1)) is None, "some block is unlike the others"
    assert traced_depths(replace(deep, with_layers=lambda layers: None)) is None


def test_models_whose_phases_differ_are_carried_on_by_their_peaks() -> None:
    low = _Phases(live=np.array([1.0, 5.0, 2.0]), ops=np.array(["a"] * 3), starts=[0, 3])
    high = _Phases(live=np.array([1.0, 7.0, 9.0]), ops=np.array(["a"] * 3), starts=[0, 2, 3])
    assert _carried_peak(low, high, 2.0) == 5 + 4 * 2


def test_moments_that_are_not_the_same_are_not_carried_on() -> None:
    """A phase that first takes a byte for each weight, then a large block at once, and then goes through the weights: the large block comes
    later in the deeper model. Compared by its place alone it would count as growing with the depth (an 8B under FSDP2 was 30 % over)."""

    def phase(weights: int) -> _Phases:
        live = [*range(1, weights + 1), weights + 10, *[weights] * (3 * weights)]
        return _Phases(
            live=np.array(live, dtype=float), ops=np.array(["own"] * weights + ["large"] + ["other"] * 3 * weights), starts=[0, len(live)]
        )

    assert _carried_peak(phase(4), phase(8), share_of(32)) == phase(32).live.max()


def test_kernels_over_all_weights_grow_and_the_others_run_more_often() -> None:
    def op(name: str, count: float, size: float) -> OpCost:
        return OpCost(
            name=name, kind="optimizer", dtype="float32", phase="optimizer", count=count,
            flops_constant=0, flops_slope=0, bytes_constant=size, bytes_slope=0,
        )  # fmt: skip

    few, many = (op("mm", 8, 10), op("adam", 1, 100)), (op("mm", 16, 10), op("adam", 1, 180))
    made = {one.name: one for one in deeper_ops(few, many, share_of(16))}
    assert (made["mm"].count, made["mm"].bytes_constant) == (32, 10)
    assert (made["adam"].count, made["adam"].bytes_constant) == (1, 340)
