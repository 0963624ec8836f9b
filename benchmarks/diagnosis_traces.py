"""Synthesised traces of cards under loads that this machine cannot make: a minute of readings with noise, and the times of the steps.

The levels are typical of data-centre and consumer cards (idle draw 10 to 20 % of the limit, matrix products 80 to 100 %), not measurements.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hfopt.monitor.sampler import flagged
from hfopt.monitor.window import gpu_windows
from hfopt.schema import GpuReading, Phases, RankLag, RunFacts, Sample, Spread, Window
from hfopt.units import GIB

SECONDS, STEPS = 60, 120
USUAL_TIMES = {"data_wait_s": 0.02, "forward_backward_s": 0.9, "optimizer_s": 0.06, "other_s": 0.01, "logging_s": 0.005}


@dataclass(frozen=True, kw_only=True)
class Load:
    """The levels around which a trace is drawn."""

    sm: float = 0.97
    memory: float = 0.45
    power: float = 0.9  # of the limit
    limit_w: float = 300.0
    used: float = 0.75  # of the card
    foreign: float = 0.0
    clock: float = 0.9  # of the highest
    throttle: tuple[str, ...] = ()
    throttled_share: float = 0.0
    temperature_c: float = 66.0
    pcie: float = 0.02  # of the link
    mfu: float | None = 0.42
    main_thread: float = 0.95
    times: dict[str, float] | None = None
    changed: dict[str, Any] | None = None  # fields of the window
    args: dict[str, Any] | None = None
    lags: tuple[float, ...] = ()
    absurd: float = 0.0  # share of readings with a power no board draws


def trace(load: Load) -> Callable[[int], tuple[Window, RunFacts]]:
    def draw(seed: int) -> tuple[Window, RunFacts]:
        dice = random.Random(seed)
        total = dice.choice((8, 16, 24, 40, 80)) * GIB
        link = dice.choice((15.75e9, 31.5e9, 63e9))
        samples = [_sample(load, dice, second, total, link) for second in range(SECONDS)]
        shares = {**USUAL_TIMES, **(load.times or {})}
        phases = Phases(**{name: SECONDS * max(0.0, dice.gauss(share, 0.08 * share)) for name, share in shares.items()})
        window = Window(
            first_step=2,
            last_step=STEPS + 1,
            steps=STEPS,
            seconds=phases.total_s,
            phases=phases,
            logs=12,
            samples=1920.0,
            padding_share=max(0.0, dice.gauss(0.06, 0.02)),
            mfu=max(0.001, dice.gauss(load.mfu, 0.1 * load.mfu)) if load.mfu is not None else None,
            gpus=gpu_windows(samples, {}),
            cpu_util=Spread(mean=0.2, low=0.1, high=0.4),
            main_thread_util=min(1.0, dice.gauss(load.main_thread, 0.02)),
            process_cores=load.main_thread + 0.1,
            allocated_peak_bytes=int(load.used * 0.9 * total),
            reserved_peak_bytes=int(load.used * 0.97 * total),
            alloc_retries=0,
        )
        args = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "gradient_checkpointing": False, **(load.args or {})}
        lags = tuple(RankLag(rank=rank, lag_s=lag, step_s=0.5, where="forward") for rank, lag in enumerate(load.lags))
        run = RunFacts(device="cuda", cores=16.0, world_size=max(1, len(lags)), args=args, pcie_bytes_per_s=link, lags=lags)
        return replace(window, **(load.changed or {})), run

    return draw


def _sample(load: Load, dice: random.Random, second: int, total: int, link: float) -> Sample:
    def around(level: float, noise: float = 0.05, top: float = 1.0) -> float:
        return min(top, max(0.0, dice.gauss(level, noise * max(level, 0.05))))

    absurd = dice.random() < load.absurd
    used = int(total * min(1.0, load.used + load.foreign))
    reading = GpuReading(
        uuid="GPU-0",
        sm_util=around(load.sm),
        memory_util=around(load.memory, 0.1),
        used_bytes=used,
        own_used_bytes=int(total * load.used),
        total_bytes=total,
        power_w=5 * load.limit_w if absurd else load.limit_w * around(load.power, 0.06, 1.05),
        power_limit_w=load.limit_w,
        temperature_c=dice.gauss(load.temperature_c, 1.5),
        sm_clock_mhz=2000 * around(load.clock, 0.03),
        max_sm_clock_mhz=2000.0,
        throttle=load.throttle if dice.random() < load.throttled_share else (),
        pcie_rx_bytes_per_s=link * around(load.pcie, 0.1) if second % 5 == 0 else None,
        pcie_tx_bytes_per_s=link * around(load.pcie / 2, 0.1) if second % 5 == 0 else None,
    )
    return Sample(
        time_s=float(second), gpus=(flagged(reading),), cpu_util=0.2, main_thread_util=0.9, ram_used_bytes=GIB, ram_total_bytes=64 * GIB
    )


STARVED: dict[str, Any] = {
    "sm": 0.5,
    "power": 0.5,
    "mfu": 0.2,
    "main_thread": 0.6,
    "times": {"data_wait_s": 0.5, "forward_backward_s": 0.45},
}
HUNGRY: dict[str, Any] = {"sm": 0.78, "power": 0.7, "mfu": 0.3, "times": {"data_wait_s": 0.25, "forward_backward_s": 0.7}}
SMALL: dict[str, Any] = {"sm": 0.55, "memory": 0.12, "power": 0.35, "mfu": 0.04}
TRACES: dict[str, tuple[str, Callable[[int], tuple[Window, RunFacts]]]] = {
    "busy card": ("healthy", trace(Load())),
    "busy card, no MFU known": ("healthy", trace(Load(mfu=None))),
    "at its power limit": ("healthy", trace(Load(power=1.0, clock=0.82, throttle=("sw_power_cap",), throttled_share=0.95))),
    "memory bandwidth is the limit": ("healthy", trace(Load(mfu=0.1, memory=0.85, power=0.65))),
    "two thirds of the memory": ("healthy", trace(Load(used=0.66))),
    "impossible power readings": ("healthy", trace(Load(absurd=0.2))),
    "even ranks": ("healthy", trace(Load(lags=(0.0, 0.01, 0.004, 0.0)))),
    "data comes late": (
        "input_bound",
        trace(Load(**STARVED)),
    ),
    "data comes a little late": (
        "input_bound",
        trace(Load(**HUNGRY)),
    ),
    "small kernels": ("launch_bound", trace(Load(**SMALL))),
    "small kernels without a gap": ("launch_bound", trace(Load(**{**SMALL, "sm": 0.96}))),
    "small kernels, no MFU known": ("launch_bound", trace(Load(**{**SMALL, "mfu": None}))),
    "nearly full": ("near_limit", trace(Load(used=0.985))),
    "cache flushed again and again": ("fragmentation", trace(Load(changed={"alloc_retries": 30}))),
    "hot": ("throttled", trace(Load(clock=0.6, temperature_c=90.0, throttle=("sw_thermal_slowdown",), throttled_share=0.7))),
    "power brake": ("throttled", trace(Load(clock=0.45, power=0.5, mfu=0.25, throttle=("hw_power_brake",), throttled_share=0.9))),
    "capped far below its clock": ("throttled", trace(Load(clock=0.5, power=1.0, throttle=("sw_power_cap",), throttled_share=0.95))),
    "a neighbour on the card": ("shared_gpu", trace(Load(used=0.5, foreign=0.25, args={"gradient_accumulation_steps": 1}))),
    "offloading over PCIe": ("pcie_bound", trace(Load(sm=0.6, power=0.4, mfu=0.1, pcie=0.85))),
    "accumulating with room to spare": ("memory_headroom", trace(Load(used=0.3, args={"gradient_accumulation_steps": 8}))),
    "checkpointing with room to spare": ("memory_headroom", trace(Load(used=0.35, args={"gradient_checkpointing": True}))),
    "evaluates often": ("eval_heavy", trace(Load(times={"eval_s": 0.8}, changed={"evals": 12}))),
    "logs every step, slowly": ("logging_heavy", trace(Load(times={"logging_s": 0.2}, changed={"logs": 120}))),
    "saves often": ("saving_heavy", trace(Load(times={"save_s": 0.4}, changed={"saves": 6}))),
    "half padding": ("padding_waste", trace(Load(changed={"padding_share": 0.5}))),
    "a slow rank": ("slow_rank", trace(Load(power=0.45, mfu=0.1, memory=0.2, lags=(0.0, 0.002, 0.21, 0.0)))),
}
