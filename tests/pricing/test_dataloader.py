"""The loader's plan: enough workers for the demand, never more than the machine gives, none where none are needed."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.pricing.dataloader import (
    INLINE_SHARE,
    RAM_SHARE,
    WORKER_RAM_BYTES,
    Demand,
    SampleCost,
    limited_by_loader,
    measure_cost,
    plan_loader,
    typical_cost,
)
from hfopt.schema import Host, StepTime

GIB = 1 << 30
ROOMY = Host(cores=16, ram_bytes=64 * GIB, ram_free_bytes=48 * GIB)


def cost(mean_s: float, deviation_s: float = 0.0) -> SampleCost:
    return SampleCost(mean_s=mean_s, deviation_s=deviation_s, measured=True, source="test")


def demand(samples_per_s: float, *, batch: int = 32, ranks: int = 1, batch_bytes: int = 1 << 20) -> Demand:
    return Demand(micro_batch=batch, step_s=batch / samples_per_s, accumulation=1, batch_bytes=batch_bytes, ranks_on_node=ranks)


def test_text_needs_no_workers_for_a_slow_step() -> None:
    plan = plan_loader(demand(50), typical_cost("text"), ROOMY)
    assert (plan.workers, plan.prefetch_factor, plan.persistent_workers) == (0, None, False)


def test_one_worker_is_for_what_the_step_would_wait_for() -> None:
    plan = plan_loader(demand(500), cost(1e-4), ROOMY)
    assert plan.workers == 1 and "takes 5.0 % of the step" in plan.reason and "worker does it meanwhile" in plan.reason


def test_images_get_as_many_workers_as_the_rate_asks_for() -> None:
    plan = plan_loader(demand(500), cost(8e-3), ROOMY)
    assert plan.workers == 6  # 500 × 8 ms = 4 cores, and a margin of 1.3
    assert plan.prefetch_factor is not None and plan.persistent_workers and plan.pin_memory


@given(st.floats(1, 1e5), st.floats(1e-6, 0.5), st.floats(1, 128), st.integers(1, 8), st.integers(1, 64), st.integers(1 << 10, 1 << 31))
def test_never_more_than_the_cores_and_the_ram(
    rate: float, mean_s: float, cores: float, ranks: int, ram_gib: int, batch_bytes: int
) -> None:
    host = Host(cores=cores, ram_bytes=ram_gib * GIB, ram_free_bytes=ram_gib * GIB)
    plan = plan_loader(demand(rate, ranks=ranks, batch_bytes=batch_bytes), cost(mean_s, mean_s), host)
    assert 0 <= plan.workers <= max(1, cores / ranks)
    assert (plan.workers == 0) == (plan.prefetch_factor is None)
    held = plan.workers * ((plan.prefetch_factor or 0) * batch_bytes + WORKER_RAM_BYTES)
    assert held <= RAM_SHARE * host.ram_free_bytes / ranks
    if mean_s * rate <= INLINE_SHARE:
        assert plan.workers == 0


def test_a_loader_that_cannot_keep_up_says_so() -> None:
    plan = plan_loader(demand(5000), cost(8e-3), Host(cores=4, ram_bytes=64 * GIB, ram_free_bytes=48 * GIB))
    assert plan.workers == 3 and "hold the step back" in plan.reason


def test_prefetch_grows_with_the_variance() -> None:
    steady = plan_loader(demand(100, batch=4), cost(20e-3, 0), ROOMY)
    jumpy = plan_loader(demand(100, batch=4), cost(20e-3, 200e-3), ROOMY)
    assert steady.prefetch_factor == 2
    assert jumpy.prefetch_factor is not None and jumpy.prefetch_factor > 2


def test_measuring_times_indexing_and_collation_together() -> None:
    ticks = count()  # every look at the clock is one second later
    found = measure_cost([1, 2, 3, 4], lambda items: items, batch=4, budget_s=20, clock=lambda: float(next(ticks)))
    assert found is not None and found.measured and found.mean_s == 1 / 4 and found.deviation_s == 0


def test_workers_that_wait_share_the_cores() -> None:
    two_cores = Host(cores=2, ram_bytes=64 * GIB, ram_free_bytes=48 * GIB)
    busy = plan_loader(demand(500), cost(8e-3), two_cores)
    waiting = plan_loader(demand(500), replace(cost(8e-3), busy_share=0.1), two_cores)
    assert busy.workers == 1 and waiting.workers == 6
    assert "hold the step back" in busy.reason and "waits 90 %" in waiting.reason
    step = StepTime(step_s=32 / 500, busy_s=0.06, samples_per_s=500.0, tokens_per_s=None, mfu=None, bound="compute")
    assert limited_by_loader(step, busy, two_cores, samples=32).step_s == pytest.approx(32 * 8e-3)
    assert limited_by_loader(step, waiting, two_cores, samples=32).step_s == pytest.approx(step.step_s)


def test_how_much_of_a_sample_is_waiting_is_measured() -> None:
    ticks = count()
    busy_ticks = iter((0.0, 2.0))  # at the beginning and at the end
    found = measure_cost(
        [1, 2, 3, 4], lambda items: items, batch=4, budget_s=18, clock=lambda: float(next(ticks)), busy_clock=lambda: next(busy_ticks)
    )
    assert found is not None and found.busy_share == pytest.approx(2 / 20, rel=0.15)


def test_sleeping_is_waiting_and_computing_is_not() -> None:
    def work(items: list[int]) -> int:
        return sum(i * i for i in range(20_000))

    waiting, busy = (measure_cost(list(range(64)), one, budget_s=0.2) for one in (lambda items: time.sleep(0.02), work))
    assert waiting is not None and waiting.busy_share < 0.4
    assert busy is not None and busy.busy_share > 0.7


def test_data_that_cannot_be_indexed_is_not_measured() -> None:
    assert measure_cost(iter([1, 2]), list) is None
    assert measure_cost([], list) is None


def test_what_limits_the_workers_is_named_and_no_core_is_spared_twice() -> None:
    """'only 8 of the 2 cores can be spared' was said of workers that wait."""
    two_cores = Host(cores=2, ram_bytes=64 * GIB, ram_free_bytes=48 * GIB)
    waiting = plan_loader(demand(5000), replace(cost(8e-3), busy_share=0.01), two_cores)
    assert waiting.workers == 8 and "2 cores can run only 8, so the loader will hold the step back" in waiting.reason
    little = Host(cores=32, ram_bytes=4 * GIB, ram_free_bytes=4 * GIB)
    assert "the free RAM holds only 2" in plan_loader(demand(5000), cost(8e-3), little).reason
