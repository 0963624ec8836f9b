"""The causes that lie in the card: heat, neighbours, memory too full, too empty or in pieces, a full PCIe link."""

from __future__ import annotations

from hfopt.monitor import remedies
from hfopt.monitor.evidence import Thresholds, busiest, confidence, finding, memory_shares, power_share
from hfopt.monitor.windows import data_share
from hfopt.schema import Finding, RunFacts, Window
from hfopt.units import format_bytes, format_percent

_THERMAL = ("sw_thermal_slowdown", "hw_thermal_slowdown", "hw_slowdown", "hw_power_brake")  # the names of hfopt.hardware.nvml
_POWER = ("sw_power_cap",)


def throttled(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    for gpu in window.gpus:
        hot = max((gpu.throttle.get(reason, 0.0) for reason in _THERMAL), default=0.0)
        capped = max((gpu.throttle.get(reason, 0.0) for reason in _POWER), default=0.0)
        clock = gpu.sm_clock_mhz / gpu.max_sm_clock_mhz if gpu.sm_clock_mhz and gpu.max_sm_clock_mhz else None
        by_power = capped >= limits.power_cap and clock is not None and clock < limits.capped_clock
        if hot < limits.thermal and not by_power:
            continue
        temperature = gpu.temperature_c.high if gpu.temperature_c else None
        evidence = {"share_of_readings": max(hot, capped if by_power else 0.0), "clock_share": clock, "temperature_c": temperature}
        why = "heat or the board's power supply" if hot >= limits.thermal else "its power limit"
        message = f"the card is slowed by {why}" + (f": clock at {format_percent(clock)} of its maximum" if clock else "")
        message += f", {temperature:.0f} °C" if temperature is not None else ""
        gain = remedies.Remedy(predicted_gain=round(0.9 / clock - 1, 2) if clock and clock < 0.9 else None)
        return finding("throttled", confidence(max(hot, capped), limits.thermal, 0.6), evidence, message, gain)
    return None


def shared_gpu(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    for gpu in window.gpus:
        if gpu.used_bytes is None or gpu.total_bytes is None or gpu.own_used_bytes is None:
            continue
        foreign = gpu.used_bytes - gpu.own_used_bytes
        if foreign < max(limits.foreign_bytes, limits.foreign_share * gpu.total_bytes):
            continue
        evidence = {"foreign_bytes": float(foreign), "foreign_share": foreign / gpu.total_bytes}
        message = f"another process holds {format_bytes(foreign)} of the card and may compute on it"
        return finding("shared_gpu", confidence(foreign / gpu.total_bytes, limits.foreign_share, 0.2), evidence, message)
    return None


def near_limit(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    shares = memory_shares(window)
    if shares is None:
        return None
    used, allocated = shares
    if allocated is None:
        near = used >= limits.near_limit
    else:
        near = allocated >= limits.near_limit_allocated or (used >= limits.near_limit and allocated >= limits.near_limit_allocated - 0.1)
    if not near:
        return None
    message = f"memory is nearly full ({format_percent(used)} of the card): a longer batch or an evaluation may run out"
    evidence = {"used_share": used, "allocated_share": allocated}
    return finding("near_limit", confidence(max(used, allocated or 0.0), 0.88, 0.98), evidence, message, remedies.less_memory(run))


def fragmentation(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    shares, retries = memory_shares(window), window.alloc_retries or 0
    reserved, allocated = window.reserved_peak_bytes, window.allocated_peak_bytes
    slack = (reserved - allocated) / reserved if reserved and allocated is not None else None
    loose = slack is not None and slack >= limits.slack and shares is not None and shares[0] >= limits.near_limit - 0.05
    if retries < 2 and not loose:
        return None
    evidence = {"alloc_retries": float(retries), "retries_per_step": retries / window.steps, "reserved_not_allocated_share": slack}
    message = (
        f"the allocator had to flush its cache {retries} times in {window.steps} steps"
        if retries >= 2
        else "the allocator's memory is in pieces"
    )
    message += f"; {format_percent(slack)} of what it holds is not in use" if slack is not None else ""
    sure = max(confidence(retries / window.steps, 0.02, 0.2) if retries >= 2 else 0.0, 0.6 if loose else 0.0)
    return finding("fragmentation", sure, evidence, message, remedies.EXPANDABLE_SEGMENTS)


def pcie_bound(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    gpu = busiest(window)
    if gpu is None or run.pcie_bytes_per_s is None or data_share(window) >= limits.data_wait:
        return None
    traffic = max(gpu.pcie_rx_bytes_per_s or 0.0, gpu.pcie_tx_bytes_per_s or 0.0)
    share, power = traffic / run.pcie_bytes_per_s, power_share(gpu)
    working = (power is not None and power >= limits.busy_power) or (window.mfu is not None and window.mfu >= limits.busy_mfu)
    if share < limits.pcie or working:
        return None
    evidence = {"link_share": share, "bytes_per_s": traffic, "power_share": power, "mfu": window.mfu}
    message = f"the PCIe link is {format_percent(share)} full while the card waits (offloading, or gradients between cards without NVLink)"
    return finding("pcie_bound", confidence(share, limits.pcie, 0.9), evidence, message, remedies.less_traffic(run))


def memory_headroom(window: Window, run: RunFacts, limits: Thresholds, *, launch_bound: bool) -> Finding | None:
    """Unused memory is only worth a word where it can buy time: against accumulation, recomputation, or small kernels."""
    shares = memory_shares(window)
    if shares is None or shares[0] >= limits.headroom:
        return None
    remedy = remedies.use_memory(shares[0], run, launch_bound=launch_bound)
    if remedy is None:
        return None
    message = f"{format_percent(1 - shares[0])} of the card's memory is never used"
    evidence = {"used_share": shares[0], "allocated_share": shares[1]}
    return finding("memory_headroom", confidence(-shares[0], -limits.headroom, -0.3), evidence, message, remedy)
