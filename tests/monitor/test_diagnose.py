"""Each cause from figures that show it, none from figures that do not, and never from utilization alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from watched import card, facts, spread, window

from hfopt.monitor.diagnose import diagnose
from hfopt.schema import Change, GpuWindow, RankLag, RunFacts, Window
from hfopt.units import GIB

IDLE_CARD = (card(sm_util=spread(0.55), memory_util=spread(0.1), power_w=spread(55.0)),)
IDLE = {"mfu": 0.04, "gpu": IDLE_CARD[0]}
ILL: dict[str, tuple[Window, RunFacts]] = {
    "input_bound": (window(times={"data_wait_s": 40.0}, mfu=0.2, gpu=card(sm_util=spread(0.5))), facts()),
    "launch_bound": (window(**IDLE), facts()),
    "near_limit": (window(gpu=card(used_bytes=int(23.6 * GIB), own_used_bytes=int(23.6 * GIB)), allocated_peak_bytes=22 * GIB), facts()),
    "fragmentation": (window(alloc_retries=12), facts()),
    "throttled": (window(gpu=card(throttle={"sw_thermal_slowdown": 0.6}, temperature_c=spread(91.0), sm_clock_mhz=900.0)), facts()),
    "shared_gpu": (window(gpu=card(own_used_bytes=12 * GIB)), facts()),
    "pcie_bound": (window(mfu=0.08, gpu=card(pcie_rx_bytes_per_s=26e9, power_w=spread(60.0), sm_util=spread(0.6))), facts()),
    "eval_heavy": (window(times={"eval_s": 60.0}, evals=10), facts()),
    "logging_heavy": (window(times={"logging_s": 12.0}, logs=100), facts()),
    "saving_heavy": (window(times={"save_s": 20.0}, saves=5), facts()),
    "padding_waste": (window(padding_share=0.55), facts()),
    "slow_rank": (
        window(),
        facts(lags=tuple(RankLag(rank=rank, lag_s=lag_s, step_s=0.6, where="forward") for rank, lag_s in enumerate((0.0, 0.01, 0.0, 0.2)))),
    ),
    "memory_headroom": (
        window(gpu=card(used_bytes=7 * GIB, own_used_bytes=7 * GIB), allocated_peak_bytes=5 * GIB, reserved_peak_bytes=6 * GIB),
        facts(args={"gradient_accumulation_steps": 8}),
    ),
}


def causes(one: Window, run: RunFacts | None = None) -> set[str]:
    return {finding.cause for finding in diagnose(one, run or facts())}


@pytest.mark.parametrize("cause", ILL)
def test_the_cause_is_named_with_evidence(cause: str) -> None:
    findings = diagnose(*ILL[cause])
    named = {finding.cause: finding for finding in findings}
    assert set(named) - {"compute_bound"} == {cause}
    assert 0.5 <= named[cause].confidence <= 0.95
    assert named[cause].evidence and all(isinstance(value, float) for value in named[cause].evidence.values())
    assert named[cause].message


@pytest.mark.parametrize(
    "healthy",
    [
        window(),
        window(mfu=None),
        window(gpu=card(power_w=None, power_limit_w=None)),
        window(gpu=card(throttle={"sw_power_cap": 0.9})),  # at its power limit, at full clock: that is what it is for
        window(gpu=card(own_used_bytes=None)),
        window(times={"eval_s": 5.0, "save_s": 2.0}, evals=2, saves=2),
        window(times={"data_wait_s": 6.0}),
        window(
            gpu=card(used_bytes=23 * GIB, own_used_bytes=23 * GIB),
            allocated_peak_bytes=18 * GIB,
            reserved_peak_bytes=22 * GIB,
        ),
    ],
)
def test_a_healthy_run_is_compute_bound_and_nothing_else(healthy: Window) -> None:
    assert causes(healthy) == {"compute_bound"}


@pytest.mark.parametrize("util", [0.05, 0.3, 0.99])
def test_utilization_alone_decides_nothing(util: float) -> None:
    blind = card(sm_util=spread(util), memory_util=None, power_w=None, pcie_rx_bytes_per_s=None, pcie_tx_bytes_per_s=None)
    assert causes(window(gpu=blind, mfu=None)) == set()


def test_high_utilization_with_little_power_and_few_flops_is_launch_bound() -> None:
    busy_doing_little = card(sm_util=spread(0.98), memory_util=spread(0.1), power_w=spread(50.0))
    assert "launch_bound" in causes(window(gpu=busy_doing_little, mfu=0.03))
    assert "launch_bound" not in causes(window(gpu=busy_doing_little, mfu=0.03, main_thread_util=0.2, process_cores=1.5))


def test_a_memory_bandwidth_bound_card_is_not_launch_bound() -> None:
    assert causes(window(gpu=card(memory_util=spread(0.8), power_w=spread(70.0)), mfu=0.06)) == {"compute_bound"}


def test_a_host_that_runs_ahead_hides_its_wait_while_the_card_is_busy() -> None:
    waiting = window(times={"data_wait_s": 30.0}, synced=False)
    assert "input_bound" not in causes(waiting)
    assert "input_bound" in causes(replace(waiting, gpus=(card(sm_util=spread(0.5)),)))


def test_small_kernels_between_short_waits_are_told_beside_the_waits() -> None:
    assert causes(replace(window(times={"data_wait_s": 15.0}), mfu=0.03, gpus=IDLE_CARD)) == {"input_bound", "launch_bound"}
    assert causes(replace(window(times={"data_wait_s": 15.0}), mfu=None, gpus=IDLE_CARD)) == {"input_bound"}
    assert causes(replace(window(times={"data_wait_s": 90.0}), mfu=0.03, gpus=IDLE_CARD)) == {"input_bound"}


def test_too_few_steps_say_nothing() -> None:
    assert diagnose(window(times={"data_wait_s": 40.0}, steps=4), facts()) == ()


def test_one_save_or_evaluation_is_no_habit() -> None:
    assert causes(window(times={"save_s": 60.0}, saves=1)) == {"compute_bound"}
    assert causes(window(times={"eval_s": 60.0}, evals=1)) == {"compute_bound"}


def cpu(**changed: Any) -> Window:
    return replace(window(**changed), gpus=(), allocated_peak_bytes=None, reserved_peak_bytes=None, alloc_retries=None)


def test_the_cpu_is_judged_by_flops_per_busy_second() -> None:
    run = replace(facts(), device="cpu")
    assert causes(cpu(mfu=0.02, main_thread_util=0.9, process_cores=1.0), run) == {"launch_bound"}
    assert causes(cpu(mfu=0.02, main_thread_util=0.25, process_cores=0.27), run) == {"launch_bound"}  # a machine shared with others
    assert causes(cpu(mfu=0.15, main_thread_util=0.25, process_cores=0.27), run) == {"compute_bound"}
    assert causes(cpu(mfu=0.5, main_thread_util=0.99, process_cores=7.5), run) == {"compute_bound"}


def test_small_operations_are_told_on_a_machine_that_leaves_the_run_little_time() -> None:
    run = replace(facts(), device="cpu", layers=40)
    starved = {"main_thread_util": 0.1, "process_cores": 0.2}  # the other half is a helper thread that spins
    assert causes(cpu(mfu=1e-5, **starved, preempted=0.98), run) == {"launch_bound"}
    assert causes(cpu(mfu=1e-5, **starved, preempted=0.3), run) == set()  # it waits for something
    assert causes(cpu(mfu=1e-5, **starved), run) == set()


def test_waiting_for_data_is_told_where_the_queue_for_a_core_hides_it() -> None:
    run = replace(facts(), device="cpu")
    hidden = cpu(times={"data_wait_s": 3.0}, preempted=0.95, free_wait=0.5)  # 5 % by the clock
    assert "input_bound" in causes(hidden, run)
    assert "input_bound" not in causes(replace(hidden, free_wait=None), run)
    assert "input_bound" not in causes(cpu(times={"data_wait_s": 20.0}, free_wait=0.02), run)  # put off its core while it collated


def test_large_operations_are_not_launch_bound_however_long_they_take() -> None:
    """A hundred steps in a minute of which 1 % is arithmetic at the peak: 6 ms a step, beside 2 ms of launching 40 layers."""
    slow = cpu(mfu=0.01, main_thread_util=0.9, process_cores=1.8, preempted=0.98)
    assert causes(slow, replace(facts(), device="cpu", layers=20000)) == {"launch_bound"}
    assert causes(slow, replace(facts(), device="cpu", layers=40)) == set()


def changes(cause: str, **args: Any) -> dict[str, Any]:
    one, run = ILL[cause]
    (found,) = [finding for finding in diagnose(one, replace(run, args={**run.args, **args})) if finding.cause == cause]
    return {change.key: change.after for change in found.changes}


def test_workers_follow_from_the_measured_rates() -> None:
    """40 of 98.5 s are waits with 2 workers, so loading takes 2 × 98.5 s of one core; computing takes 58.5 s: 4 workers."""
    assert changes("input_bound")["dataloader_num_workers"] == 4
    assert changes("input_bound", dataloader_num_workers=0)["dataloader_num_workers"] == 1
    (found,) = [one for one in diagnose(*ILL["input_bound"]) if one.cause == "input_bound"]
    assert found.predicted_gain == pytest.approx(98.5 / 58.5 - 1, abs=0.01)


def test_no_more_workers_than_cores() -> None:
    one, run = ILL["input_bound"]
    (found,) = [finding for finding in diagnose(replace(one, worker_util=0.9), replace(run, cores=2.0)) if finding.cause == "input_bound"]
    assert "dataloader_num_workers" not in {change.key for change in found.changes} and "2 cores" in found.changes[0].reason


def test_workers_that_wait_share_the_cores() -> None:
    """'All 2 cores load already' stood beside a CPU that was busy 18 % of the time."""
    one, run = ILL["input_bound"]
    (found,) = [finding for finding in diagnose(replace(one, worker_util=0.2), replace(run, cores=2.0)) if finding.cause == "input_bound"]
    assert found.changes[0].key == "dataloader_num_workers" and found.changes[0].after == 4 and "20 % of a core" in found.changes[0].reason


def test_the_effective_batch_is_kept_where_memory_is_traded() -> None:
    assert changes("memory_headroom") == {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 4}
    assert changes("near_limit") == {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert changes("near_limit", per_device_train_batch_size=1) == {"gradient_checkpointing": True}
    assert changes("memory_headroom", gradient_accumulation_steps=1, gradient_checkpointing=True) == {"gradient_checkpointing": False}


def test_nothing_is_traded_where_the_plan_says_that_gradients_would_change() -> None:
    for cause in ("memory_headroom", "near_limit", "launch_bound"):
        one, run = ILL[cause]
        args = {**run.args, "gradient_accumulation_steps": 4}
        free = diagnose(one, replace(run, args=args))
        fixed = diagnose(one, replace(run, args=args, keeps_accumulation=True))
        keys = [{change.key for found in all_ for change in found.changes if found.cause == cause} for all_ in (free, fixed)]
        assert "gradient_accumulation_steps" in keys[0] and "gradient_accumulation_steps" not in keys[1]
        assert "per_device_train_batch_size" not in keys[1]


def test_unused_memory_that_buys_nothing_is_no_finding() -> None:
    one, run = ILL["memory_headroom"]
    assert causes(one, replace(run, args={**run.args, "gradient_accumulation_steps": 1})) == {"compute_bound"}


def test_evaluation_is_spread_out_until_it_takes_a_twentieth() -> None:
    after = changes("eval_heavy")["eval_steps"]
    assert 60.0 * 100 / after / (60.0 * 100 / after + 60.0) <= 0.05
    assert "per_device_eval_batch_size" in changes("eval_heavy", eval_strategy="epoch")


def test_padding_advice_fits_the_cause_of_the_padding() -> None:
    assert changes("padding_waste") == {"train_sampling_strategy": "group_by_length"}
    assert changes("padding_waste", train_sampling_strategy="group_by_length") == {"packing": True}
    one, run = ILL["padding_waste"]
    (found,) = [finding for finding in diagnose(replace(one, fixed_length=True), run) if finding.cause == "padding_waste"]
    assert found.changes[0].after == "longest"


def test_the_plan_speaks_before_the_arithmetic() -> None:
    planned = tuple(
        Change(key=key, before=None, after=value, reason="planned") for key, value in (("dataloader_num_workers", 6), ("bf16", True))
    )
    one, run = ILL["input_bound"]
    (found,) = [f for f in diagnose(one, replace(run, planned=planned, planned_gain=0.7)) if f.cause == "input_bound"]
    assert [(change.key, change.after) for change in found.changes] == [("dataloader_num_workers", 6)]
    assert found.predicted_gain == 0.7


def test_a_plan_already_in_force_is_not_repeated() -> None:
    planned = (Change(key="dataloader_num_workers", before=0, after=2, reason="measured"),)
    one, run = ILL["input_bound"]
    (found,) = [f for f in diagnose(one, replace(run, planned=planned)) if f.cause == "input_bound"]
    assert found.changes[0].after == 4


def test_findings_come_weightiest_first_and_the_good_one_last() -> None:
    both = window(times={"eval_s": 60.0}, evals=10, padding_share=0.35)
    assert [finding.cause for finding in diagnose(both, facts())] == ["eval_heavy", "padding_waste", "compute_bound"]


def test_a_card_that_tells_nothing_is_not_accused() -> None:
    assert causes(window(gpu=GpuWindow(uuid="GPU-0"), mfu=None)) == set()


def test_a_run_starved_of_cpu_is_not_called_healthy() -> None:
    """12 % of a core, the rest taken by others, was called compute-bound."""
    run = replace(facts(), device="cpu")
    fed_well = cpu(mfu=0.5, main_thread_util=0.99, process_cores=2.0, core_wait=0.05)
    assert causes(fed_well, run) == {"compute_bound"}
    starved = diagnose(replace(fed_well, main_thread_util=0.12, process_cores=0.12, core_wait=0.8), run)
    assert {found.cause for found in starved} == {"cpu_starved"}
    assert "waits 80.0 % of the time for a core; it had 12.0 % of one" in starved[0].message
    assert "cpu_starved" not in causes(replace(fed_well, core_wait=None), run)
