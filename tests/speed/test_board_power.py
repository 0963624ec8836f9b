"""The power rule: laws that hold whatever its constants are, and cards whose matrix products others measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.hardware.catalog import cards, find, fp32_per_sm_clock, lookup
from hfopt.schema import Gpu, OpCost
from hfopt.speed.device_speed import Board, Speed, board_of, efficiency, speed_of, sustained_clock
from hfopt.speed.step_time import StepTimer

PRODUCTS = (
    OpCost(
        name="mm.default", kind="matmul", dtype="bfloat16", phase="forward", count=50,
        flops_constant=0, flops_slope=2 * 8192**3, bytes_constant=0, bytes_slope=6 * 8192**2,
        shape=((0, 8192), (8192, 0), (8192, 0), (1, 0)),
    ),
)  # fmt: skip


def fast(gpu: Gpu) -> Speed:
    speed = speed_of(gpu)
    assert speed is not None
    return speed


def board(gpu: Gpu) -> Board:
    found = board_of(gpu, efficiency()["power"])
    assert found is not None
    return found


def clock_under_products(gpu: Gpu, precision: str) -> float:
    """The share of the nominal clock while the card does nothing but multiply."""
    one = board(gpu)
    width = one.width_weight(gpu.peak_flops[precision], precision)
    return sustained_clock(one, lambda clock: one.static_w + one.joules(plain_s=1, weighted_s=width, moved_bytes=0, clock=clock))


@given(st.sampled_from([card for card in cards() if card.power_limit_w]), st.integers(1, 64))
def test_no_step_draws_more_than_the_board_may(card: Gpu, batch: int) -> None:
    found = StepTimer(PRODUCTS, fast(card), "bf16").at(batch)
    assert found.power_w is not None and card.power_limit_w is not None and found.clock_share is not None
    assert 0 < found.power_w <= card.power_limit_w * 1.0001
    held = found.clock_share < board(card).highest_clock - 1e-3
    assert not held or found.power_w > 0.98 * card.power_limit_w, "a clock is held down by power alone"


@given(st.floats(60, 400), st.floats(1.05, 2))
def test_more_power_never_slows_a_card(limit_w: float, factor: float) -> None:
    card = find("a10")
    low, high = (
        StepTimer(PRODUCTS, fast(replace(card, power_limit_w=watts)), "bf16").at(4).step_s for watts in (limit_w, limit_w * factor)
    )
    assert high <= low * 1.0001


@pytest.mark.parametrize(
    ("name", "precision", "measured"),
    [  # shares of the peak that large products reached, benchmarks/data/published_matmul.csv; sources are there
        ("l4", "bf16", 0.47),
        ("l4", "tf32", 0.43),
        ("a40", "fp16", 0.80),
        ("rtx a4000", "fp16", 0.75),
        ("a100 pcie 40gb", "bf16", 0.68),
        ("a100 pcie 40gb", "tf32", 0.65),
        ("v100 sxm2 16gb", "fp16", 0.71),
        ("t4", "fp16", 0.37),
        ("l40s", "bf16", 0.73),
        ("rtx 4090", "bf16", 0.96),
    ],
)
def test_the_rule_meets_cards_of_70_to_450_watts(name: str, precision: str, measured: float) -> None:
    assert 0.94 * clock_under_products(find(name), precision) == pytest.approx(measured, rel=0.12)


def test_waiting_for_memory_leaves_more_of_the_clock_than_multiplying() -> None:
    """The limit is on the average: kernels between the products pay for them."""
    between = OpCost(
        name="add.Tensor", kind="elementwise", dtype="bfloat16", phase="forward", count=50,
        flops_constant=0, flops_slope=0, bytes_constant=0, bytes_slope=4 * 10**9,
    )  # fmt: skip
    card = fast(find("h100 pcie"))
    alone, mixed = StepTimer(PRODUCTS, card, "bf16").at(1), StepTimer((*PRODUCTS, between), card, "bf16").at(1)
    assert alone.clock_share is not None and mixed.clock_share is not None
    assert alone.clock_share < mixed.clock_share


def test_a_step_draws_for_its_multiplications_as_the_measured_products_do() -> None:
    """Not for the time its products take: that has waves and writes in it."""
    card = replace(find("a100 sxm 80gb"), power_limit_w=2000.0)
    found, one = StepTimer(PRODUCTS, fast(card), "bf16").at(1), board(card)
    peak, operations = card.peak_flops["bf16"], 50 * 2 * 8192**3
    multiplying_s = operations / (peak * one.reached)
    assert multiplying_s < 0.95 * found.busy_s
    drawn_j = one.joules(
        plain_s=found.busy_s, weighted_s=multiplying_s * one.width_weight(peak, "bf16"), moved_bytes=50 * 6 * 8192**2, clock=1.0
    )
    assert found.clock_share == 1.0
    assert found.power_w == pytest.approx(one.static_w + drawn_j / found.step_s, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "dtype", "measured"),
    [  # the rate of products of 2048 over that of 8192, benchmarks/data/published_matmul_sizes.csv; sources are there
        ("h100 sxm", "float16", 0.88),
        ("h100 sxm", "bfloat16", 0.85),
        ("v100 sxm2 16gb", "float16", 0.80),
        ("rtx 3080", "float16", 0.94),
        ("rtx 3060", "bfloat16", 0.93),
    ],
)
def test_small_products_are_slower_by_what_a_tile_takes_besides_multiplying(name: str, dtype: str, measured: float) -> None:
    def rate(size: int) -> float:
        product = replace(
            PRODUCTS[0], dtype=dtype, count=1e5, flops_slope=2 * size**3, bytes_slope=6 * size**2,
            shape=((0, size), (size, 0), (size, 0), (1, 0)),
        )  # fmt: skip
        return 2 * size**3 / StepTimer([product], fast(find(name)), "fp32").each_kernel_s(1)[0]

    assert rate(2048) / rate(8192) == pytest.approx(measured, rel=0.08)


def test_a_card_of_unknown_power_runs_at_its_nominal_clock() -> None:
    unknown = replace(find("a10"), power_limit_w=None)
    found = StepTimer(PRODUCTS, fast(unknown), "bf16").at(4)
    assert (found.clock_share, found.power_w) == (None, None)
    assert board_of(replace(find("a10"), capability=(13, 0)), efficiency()["power"]) is None, "its clock is not known"
    assert fp32_per_sm_clock(None) is None


def test_a_mig_instance_has_its_share_of_the_power() -> None:
    whole, part = find("a100 sxm 80gb"), lookup("a100 sxm 80gb mig 3g.40gb").gpu
    assert whole.power_limit_w is not None and part.power_limit_w is not None and part.sms and whole.sms
    assert part.power_limit_w == pytest.approx(whole.power_limit_w * part.sms / whole.sms)


def test_every_process_is_named_once_and_all_capabilities_of_the_catalog_have_one() -> None:
    listed = [one for process in efficiency()["power"]["processes"].values() for one in process["capabilities"]]
    assert len(listed) == len(set(listed))
    assert {f"{card.capability[0]}.{card.capability[1]}" for card in cards() if card.capability} <= set(listed)
