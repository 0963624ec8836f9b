"""The curve: exact where it is replayed, cheap where it is vectorised, and a breakdown that adds up."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from hfopt.errors import ConfigError, TraceError
from hfopt.memory.allocator import AllocatorOptions
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.schema import Checkpointing, StepSettings, Workload

Make = Callable[..., Workload]


@pytest.fixture
def traced(tiny_gpt2: Make) -> Estimate:
    return estimate(tiny_gpt2(), StepSettings())


def test_the_breakdown_adds_up_to_the_device_peak_exactly(traced: Estimate) -> None:
    peak = traced.curve.peak(16)
    assert peak.breakdown is not None
    assert peak.breakdown.total_bytes == peak.device_bytes
    assert min(getattr(peak.breakdown, name) for name in peak.breakdown.__dataclass_fields__) >= 0


def test_weights_gradients_and_adam_are_four_times_the_parameters(traced: Estimate, tiny_gpt2: Make) -> None:
    model = tiny_gpt2().build_model()
    weights = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())  # the causal mask of each layer in transformers 4
    breakdown = traced.curve.peak(1).breakdown
    assert breakdown is not None
    assert breakdown.weights_bytes == pytest.approx(weights + buffers, rel=0.01)
    assert breakdown.optimizer_bytes == pytest.approx(2 * weights, rel=0.01)


def test_vectorised_peaks_agree_with_the_replay(tiny_gpt2: Make) -> None:
    """On a model of whose memory one segment of 20 MiB is a few per cent: where it comes a batch size sooner, no interpolation sees it."""
    curve = estimate(tiny_gpt2(n_embd=768, n_layer=4), StepSettings()).curve
    batches = [1, 3, 7, 20, 55, 100]
    for fast, batch in zip(curve.peaks(batches), batches, strict=True):
        exact = curve.peak(batch)
        assert fast.allocated_bytes == pytest.approx(exact.allocated_bytes, rel=0.02)
        assert fast.reserved_bytes == pytest.approx(exact.reserved_bytes, rel=0.1)


def test_the_allocators_settings_decide_what_is_reserved_everywhere(traced: Estimate, tiny_gpt2: Make) -> None:
    told = estimate(tiny_gpt2(), StepSettings(allocator="expandable_segments:True")).curve
    grown = told.peak(16)
    assert grown == traced.curve.peak(16, AllocatorOptions(expandable_segments=True)) != traced.curve.peak(16)
    assert told.peaks([16])[0].reserved_bytes == pytest.approx(grown.reserved_bytes, rel=0.001)
    assert told.fits(16, grown.device_bytes) and not told.fits(16, grown.device_bytes - 1)
    with pytest.raises(ConfigError, match="key:value"):
        estimate(tiny_gpt2(), StepSettings(allocator="nonsense"))


def test_ten_thousand_batch_sizes_in_under_a_second(traced: Estimate) -> None:
    began = time.thread_time()  # of this thread alone: others may have the cores
    peaks = traced.curve.peaks(range(1, 10_001))
    assert time.thread_time() - began < 1
    assert all(a.allocated_bytes <= b.allocated_bytes for a, b in pairwise(peaks))


def test_the_largest_batch_fits_and_the_next_does_not(traced: Estimate) -> None:
    budget = traced.curve.peak(10).device_bytes + (200 << 20)
    largest = traced.curve.largest_batch(budget)
    assert largest is not None
    assert traced.curve.fits(largest, budget)
    assert not traced.curve.fits(largest + 1, budget)
    assert traced.curve.largest_batch(traced.curve.context_bytes) is None


@pytest.mark.slow
def test_checkpointing_trades_activations(tiny_gpt2: Make, traced: Estimate) -> None:
    workload = tiny_gpt2(n_layer=4)
    plain = estimate(workload, StepSettings()).curve.peak(64)
    saved = estimate(workload, StepSettings(checkpointing=Checkpointing(every_n_layers=1))).curve.peak(64)
    assert saved.allocated_bytes < plain.allocated_bytes


def test_the_moment_of_the_peak_names_phase_module_and_operation(traced: Estimate) -> None:
    moment = traced.curve.peak(64).moment
    assert moment is not None
    assert moment.split(",")[0] in ("forward", "backward", "optimizer")
    assert "aten::" in moment


def test_batch_zero_is_refused(traced: Estimate) -> None:
    with pytest.raises(TraceError, match="batch size of 0"):
        traced.curve.peak(0)


def test_kernels_are_priced_in_all_three_phases(traced: Estimate) -> None:
    assert {op.phase for op in traced.ops} == {"forward", "backward", "optimizer"}
    matmuls = [op for op in traced.ops if op.kind == "matmul" and op.phase == "forward"]
    assert sum(op.count * op.flops_slope for op in matmuls) > 0
