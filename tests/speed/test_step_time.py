"""The step-time model: laws that hold whatever the constants are, and the launch-bound small model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.schema import Gpu, OpCost
from hfopt.speed.device_speed import Speed, architecture, efficiency, speed_of
from hfopt.speed.step_time import RankTraffic, StepTimer, step_time

A100 = Gpu(
    name="A100",
    memory_bytes=80 << 30,
    capability=(8, 0),
    sms=108,
    bandwidth_bytes_per_s=2.0e12,
    peak_flops={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
    nvlink_bytes_per_s=300e9,
)
V100 = Gpu(
    name="V100", memory_bytes=16 << 30, capability=(7, 0), sms=80, bandwidth_bytes_per_s=9e11, peak_flops={"fp32": 15.7e12, "fp16": 125e12}
)


def fast(gpu: Gpu = A100) -> Speed:
    speed = speed_of(gpu)
    assert speed is not None
    return speed


def matmul(width: int, tokens: int, *, dtype: str = "bfloat16", phase: str = "forward", count: float = 10) -> OpCost:
    size = 2 if dtype == "bfloat16" else 4
    return OpCost(
        name="mm.default",
        kind="matmul",
        dtype=dtype,
        phase=phase,  # type: ignore[arg-type]
        count=count,
        flops_constant=0,
        flops_slope=2 * tokens * width * width,
        bytes_constant=size * width * width,
        bytes_slope=size * 2 * tokens * width,
        shape=((0, tokens), (width, 0), (width, 0), (1, 0)),
    )


def elementwise(elements: int, *, phase: str = "forward", count: float = 10) -> OpCost:
    return OpCost(
        name="add.Tensor",
        kind="elementwise",
        dtype="float32",
        phase=phase,  # type: ignore[arg-type]
        count=count,
        flops_constant=0,
        flops_slope=elements,
        bytes_constant=0,
        bytes_slope=12 * elements,
    )


def network(width: int, tokens: int, dtype: str = "bfloat16") -> tuple[OpCost, ...]:
    both = [(matmul(width, tokens, dtype=dtype, phase=p), elementwise(width * tokens, phase=p)) for p in ("forward", "backward")]
    return (*(op for pair in both for op in pair), elementwise(0, phase="optimizer", count=20))


BIG, TINY = network(4096, 1024), network(64, 16)


@given(st.integers(1, 512), st.integers(1, 8))
def test_throughput_is_samples_over_time_and_busy_never_exceeds_the_step(batch: int, accumulation: int) -> None:
    found = step_time(BIG, fast(), "bf16", batch=batch, accumulation=accumulation)
    assert found.samples_per_s == pytest.approx(batch * accumulation / found.step_s)
    assert 0 < found.busy_s <= found.step_s
    assert found.mfu is not None and 0 < found.mfu < 1
    assert sum(found.shares.values()) <= 1 + 1e-9


@given(st.integers(1, 256))
def test_a_larger_batch_never_takes_less_time(batch: int) -> None:
    timer = StepTimer(BIG, fast(), "bf16")
    assert timer.at(batch + 64).step_s >= timer.at(batch).step_s * 0.999


@given(st.sampled_from([2, 4, 8, 16]))
def test_accumulation_never_beats_one_large_batch(parts: int) -> None:
    for ops in (BIG, TINY):
        timer = StepTimer(ops, fast(), "bf16")
        assert timer.at(64, 1).step_s <= timer.at(64 // parts, parts).step_s * 1.001


def test_a_tiny_model_is_launch_bound_at_low_utilization_and_a_big_one_is_not() -> None:
    tiny, big = step_time(TINY, fast(), "bf16", batch=32), step_time(BIG, fast(), "bf16", batch=32)
    assert tiny.bound == "launch" and tiny.gpu_utilization < 0.5
    assert big.bound == "compute" and big.gpu_utilization > 0.9


def test_precision_orders_the_speeds_of_the_same_arithmetic() -> None:
    ops = network(4096, 1024, dtype="float32")
    fp32, tf32 = (step_time(ops, fast(), precision, batch=8).step_s for precision in ("fp32", "tf32"))  # type: ignore[arg-type]
    bf16 = step_time(BIG, fast(), "bf16", batch=8).step_s
    assert bf16 < tf32 < fp32


def test_whole_waves_cost_what_they_hold() -> None:
    """One tile more than the card has SMs takes a second wave."""
    timer = StepTimer([matmul(8192, 128, count=1000)], fast(), "bf16")
    per_sample = [timer.at(batch).step_s / batch for batch in range(1, 40)]
    assert max(per_sample[8:]) / min(per_sample[8:]) > 1.02


def test_gradients_cross_the_link_once_per_step_and_shards_in_every_micro_batch() -> None:
    ranks = RankTraffic(world_size=8, step_bytes=40 << 30)
    alone = StepTimer(BIG, fast(), "bf16").at(4, 4)
    reduced = StepTimer(BIG, fast(), "bf16", ranks=ranks).at(4, 4)
    sharded = StepTimer(BIG, fast(), "bf16", ranks=RankTraffic(world_size=8, micro_batch_bytes=60 << 30)).at(4, 4)
    assert alone.step_s < reduced.step_s < sharded.step_s
    assert sharded.bound == "communication"


def test_kernels_are_slower_beside_communication_and_all_wait_for_the_slowest() -> None:
    def seconds(world: int, sent_bytes: float, ops: tuple[OpCost, ...] = BIG) -> float:
        return StepTimer(ops, fast(), "bf16", ranks=RankTraffic(world_size=world, micro_batch_bytes=sent_bytes)).at(64).step_s

    sent = 1 << 30  # 3.6 ms on this link, hidden
    assert seconds(8, sent) - seconds(8, 0) == pytest.approx(24 / 132 * sent / 300e9, rel=0.1)
    assert seconds(1, 0) < seconds(2, 0) < seconds(8, 0) < seconds(128, 0)
    assert seconds(8, 0) / seconds(1, 0) == pytest.approx(1 + 0.015 * 1.42, abs=0.001)  # of eight, the slowest is 1.42 deviations off
    few = 1 << 20  # hidden behind tiny kernels too
    starved = (seconds(8, few, TINY) - seconds(8, 0, TINY)) * 300e9 / few
    assert starved < 0.5 * 24 / 132  # a card that waits for its host loses less


def test_reading_a_number_back_costs_a_wait_and_no_kernel() -> None:
    sync = OpCost(
        name="_local_scalar_dense.default", kind="other", dtype="float32", phase="forward", count=100,
        flops_constant=0, flops_slope=0, bytes_constant=0, bytes_slope=0,
    )  # fmt: skip
    without, with_sync = step_time(TINY, fast(), "bf16", batch=4), step_time((*TINY, sync), fast(), "bf16", batch=4)
    assert with_sync.step_s > without.step_s and with_sync.busy_s == pytest.approx(without.busy_s)


def test_a_card_without_peaks_has_no_speed() -> None:
    assert speed_of(Gpu(name="mystery", memory_bytes=8 << 30)) is None


@pytest.mark.parametrize("capability", [(5, 2), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0), None])
def test_every_capability_finds_its_shares(capability: tuple[int, int] | None) -> None:
    name, shares = architecture(capability)
    assert name in efficiency()["architectures"]
    assert all(0 < share <= 1 for share in shares["matmul"].values()) and 0 < shares["memory"] <= 1 and 0 < shares["flash"] <= 1


def test_older_torch_launches_slower_and_has_the_older_flash_attention() -> None:
    old, new = (speed_of(A100, torch_version=version) for version in ((1, 13), (2, 6)))
    between = speed_of(A100, torch_version=(2, 1))
    assert old is not None and new is not None and between is not None
    assert old.host.forward_s > new.host.forward_s == between.host.forward_s
    assert old.flash_share == between.flash_share < new.flash_share
    assert step_time(TINY, old, "bf16", batch=4).step_s > step_time(TINY, new, "bf16", batch=4).step_s


def test_attention_with_a_mask_takes_the_slower_kernel() -> None:
    def attention(name: str) -> OpCost:
        return replace(matmul(4096, 1024), name=name, kind="attention", shape=())

    flash, efficient = (
        step_time([attention(f"_scaled_dot_product_{kernel}_attention")], fast(), "bf16", batch=8).busy_s
        for kernel in ("flash", "efficient")
    )
    assert efficient > 1.3 * flash


def test_a_rate_carries_its_range_and_a_measured_cpu_none() -> None:
    assert step_time(BIG, fast(), "bf16", batch=8).rate_error is not None
    assert step_time(BIG, replace(fast(), card_error=None), "bf16", batch=8).rate_error is None


def test_a_card_with_half_rate_tensor_cores_still_gains_by_tf32() -> None:
    peaks = {"fp32": 20e12, "tf32": 20e12, "fp16": 40e12, "bf16": 40e12}
    card = Gpu(name="GeForce", memory_bytes=8 << 30, capability=(8, 6), sms=46, bandwidth_bytes_per_s=448e9, peak_flops=peaks)
    ops = network(4096, 1024, dtype="float32")
    assert step_time(ops, fast(card), "tf32", batch=8).step_s < step_time(ops, fast(card), "fp32", batch=8).step_s


def test_volta_has_no_tf32_so_it_computes_in_fp32() -> None:
    ops = network(4096, 1024, dtype="float32")
    assert step_time(ops, fast(V100), "tf32", batch=8).step_s == step_time(ops, fast(V100), "fp32", batch=8).step_s
