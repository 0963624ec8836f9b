"""What the causes are judged by: thresholds with their reasons, and shares of a window (None where the machine does not tell)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfopt.monitor.remedies import NONE, Remedy
from hfopt.schema import Cause, Finding, GpuWindow, RunFacts, Window
from hfopt.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Where a share becomes a finding. Each is the point from which the remedy is worth more than the trouble of applying it."""

    min_steps: int = 5  # fewer say nothing about the steady state
    min_seconds: float = 0.5  # less is noise of the machine, unless
    many_steps: int = 25  # average it out: a tiny model runs so many in a tenth of a second
    data_wait: float = 0.15  # of the training time
    mostly_waiting: float = 0.40  # from here on what is done between the waits does not matter
    eval_share: float = 0.25  # of the wall clock; validating as often as one learns costs about a third
    logging_share: float = 0.08
    save_share: float = 0.12
    padding: float = 0.30
    idle_mfu: float = 0.12  # transformers that keep a card busy reach 0.25 to 0.6
    busy_mfu: float = 0.25
    idle_power: float = 0.50  # of the limit; an idle card draws 0.1 to 0.2, matmuls 0.7 and more
    busy_power: float = 0.60
    busy_sm: float = 0.90
    idle_bandwidth: float = 0.35  # of the time the memory was read or written
    busy_bandwidth: float = 0.50
    one_busy_core: float = 0.80
    preempted: float = 0.80  # of the times the training thread left its core
    launch_s_per_layer: float = 50e-6  # some ten operations forward and backward of some 5 µs each
    mostly_arithmetic: float = 0.50
    headroom: float = 0.60  # less than this of the card used
    near_limit: float = 0.95
    near_limit_allocated: float = 0.88
    slack: float = 0.25  # reserved but not allocated, of the reserved
    thermal: float = 0.20  # of the readings
    power_cap: float = 0.50
    capped_clock: float = 0.70  # of the highest: cards at their power limit usually hold 0.75 to 0.9
    foreign_share: float = 0.05  # of the card's memory
    foreign_bytes: int = 512 * MIB
    pcie: float = 0.60  # of the link
    rank_lag: float = 0.15  # of the step


DEFAULT = Thresholds()


def tells_enough(window: Window, limits: Thresholds) -> bool:
    return window.steps >= limits.min_steps and (window.seconds >= limits.min_seconds or window.steps >= limits.many_steps)


def finding(cause: Cause, confidence: float, evidence: Mapping[str, float | None], message: str, remedy: Remedy | None = None) -> Finding:
    remedy = remedy or NONE
    known = {name: value for name, value in evidence.items() if value is not None}
    return Finding(
        cause=cause, confidence=confidence, evidence=known, message=message, changes=remedy.changes, predicted_gain=remedy.predicted_gain
    )


def confidence(value: float, threshold: float, certain: float) -> float:
    """0.5 at the threshold, 0.95 where there is no doubt left, straight between."""
    way = (value - threshold) / (certain - threshold)
    return round(0.5 + 0.45 * min(1.0, max(0.0, way)), 2)


def busiest(window: Window) -> GpuWindow | None:
    return max(window.gpus, key=lambda gpu: gpu.sm_util.mean if gpu.sm_util else -1.0, default=None)


def power_share(gpu: GpuWindow) -> float | None:
    return gpu.power_w.mean / gpu.power_limit_w if gpu.power_w and gpu.power_limit_w else None


def compute_mfu(window: Window) -> float | None:
    """MFU of the time spent computing: waiting for data, or for one's turn on a shared CPU, must not look like small kernels."""
    if window.mfu is None:
        return None
    if not window.gpus and window.main_thread_util:
        return min(1.0, window.mfu / window.main_thread_util)
    compute_s = window.phases.train_s - window.phases.data_wait_s
    return window.mfu * window.phases.train_s / compute_s if compute_s > 0 else None


def one_busy_core(window: Window, limits: Thresholds) -> bool:
    """The launching thread works all the time, or, on a machine it must share, whenever it is let."""
    main = window.main_thread_util
    if main is None or main >= limits.one_busy_core:
        return True
    if window.preempted is not None and window.preempted >= limits.preempted:
        return True
    total = window.process_cores
    return total is not None and main >= 0.1 and main >= limits.one_busy_core * total


def arithmetic_share(window: Window, run: RunFacts, limits: Thresholds) -> float | None:
    """Of a pass over one micro-batch on a CPU nobody else uses: its FLOPs at the peak, beside launching its operations. No clock is in it,
    so it holds however busy the machine is. None where it is not known."""
    if window.gpus or window.mfu is None or not run.layers or not window.steps:
        return None
    accumulation = run.args.get("gradient_accumulation_steps") or 1
    arithmetic_s = window.mfu * window.phases.train_s / (window.steps * accumulation)
    return arithmetic_s / (arithmetic_s + run.layers * limits.launch_s_per_layer)


def memory_shares(window: Window) -> tuple[float, float | None] | None:
    """(used, allocated) at the peak as shares of the fullest card; None where no card tells."""
    cards = [gpu for gpu in window.gpus if gpu.total_bytes and gpu.used_bytes is not None]
    if not cards:
        return None
    card = max(cards, key=lambda gpu: (gpu.used_bytes or 0) / (gpu.total_bytes or 1))
    assert card.total_bytes and card.used_bytes is not None
    used = max(card.used_bytes, window.reserved_peak_bytes or 0) / card.total_bytes
    allocated = window.allocated_peak_bytes / card.total_bytes if window.allocated_peak_bytes is not None else None
    return used, allocated
