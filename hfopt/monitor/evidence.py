"""What a window of steps shows: shares of time, and memory that creeps up from step to step, with what grows.

A healthy run holds as much after step 1,000 as after step 100. Looked at where a step has ended: torch's allocated bytes on the card, and
the process's own anonymous memory (files that are mapped, as datasets are, do not count). Growth is a finding when every third of the
stretch lies above the one before, by more than noise. Only then are the live objects counted, twice: the tensors or objects that became
more are what is kept.

What the causes are judged by: thresholds with their reasons, and shares of a window (None where the machine does not tell). The causes that
lie in the card: heat, neighbours, memory too full, too empty or in pieces, a full PCIe link.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from hfopt.monitor import advice
from hfopt.monitor.advice import NONE, SettingAdvice
from hfopt.monitor.window import data_share
from hfopt.schema import Cause, Finding, GpuWindow, RunFacts, Window
from hfopt.units import MIB, format_bytes, format_percent

_POINTS = 60  # thinned when full, so that hours are seen as well as minutes
_FEWEST_POINTS, _FEWEST_STEPS = 9, 30
_WARM_UP = 0.2  # of the points: caches and arenas fill
_NOISE = {"card": 16 * MIB, "process": 64 * MIB}
_NOISE_SHARE = 0.03
Point = tuple[int, int]  # step, bytes


@dataclass(slots=True)
class MemoryTrend:
    """One kind of memory over the run."""

    kind: str
    points: list[Point] = field(default_factory=list)
    _each: int = 1  # of the looks so many make a point
    _looks: int = 0

    def add(self, step: int, held_bytes: int) -> None:
        self._looks += 1
        if self._looks % self._each or (self.points and self.points[-1][0] >= step):
            return
        self.points.append((step, held_bytes))
        if len(self.points) > _POINTS:
            self.points, self._each = self.points[::2], 2 * self._each

    def bytes_per_step(self) -> float | None:
        """None unless it creeps."""
        seen = self.points[int(_WARM_UP * len(self.points)) :]
        if len(seen) < _FEWEST_POINTS or seen[-1][0] - seen[0][0] < _FEWEST_STEPS:
            return None
        third = len(seen) // 3
        parts = [[held for _, held in seen[start : start + third]] for start in (0, third, len(seen) - third)]
        rises = max(parts[0]) < min(parts[1]) and max(parts[1]) < min(parts[2])
        grown = median(parts[2]) - median(parts[0])
        if not rises or grown < max(_NOISE[self.kind], _NOISE_SHARE * median(parts[0])):
            return None
        return grown / (seen[len(seen) - third + third // 2][0] - seen[third // 2][0])


Census = Counter[str]


def census() -> Census:
    """How many live objects there are of each type, tensors also by their shape and whether they keep a graph."""
    found: Census = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, torch.nn.Parameter):
            graph = " with its graph" if thing.grad_fn is not None else ""
            found[f"tensor {str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}{graph}"] += 1
        elif kind.__module__ != "builtins" or kind in (list, dict):
            found[f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__name__] += 1
    return found


def what_grows(before: Census, after: Census) -> str | None:
    """The tensors that became more, else the objects that did; None where nothing stands out."""
    more = after - before
    tensors = {name: count for name, count in more.items() if name.startswith("tensor ")}
    named = tensors or {name: count for name, count in more.items() if count >= 10}
    if not named:
        return None
    name, count = max(named.items(), key=lambda pair: pair[1])
    kept = (
        ": a loss or an output that is kept without .item() or .detach() keeps all activations" if name.endswith("with its graph") else ""
    )
    return f"{count} more of {name} since the last look{kept}"


class GrowthWatch:
    """`look` at each window; a finding once, with what grows, or None."""

    def __init__(self, devices: tuple[int, ...]) -> None:
        self._devices = devices
        self._growths = {kind: MemoryTrend(kind=kind) for kind in _NOISE}
        self._before: tuple[str, Census] | None = None
        self._done = False

    def look(self, step: int) -> Finding | None:
        if self._done:
            return None
        held = {"card": sum(torch.cuda.memory_allocated(device) for device in self._devices), "process": anonymous_bytes()}
        for kind, size in held.items():
            if size:
                self._growths[kind].add(step, size)
        if self._before is not None:
            kind, before = self._before
            self._done = True
            return self._finding(kind, what_grows(before, census()))
        creeping = next((kind for kind, growth in self._growths.items() if growth.bytes_per_step() is not None), None)
        if creeping is not None:
            self._before = (creeping, census())
        return None

    def _finding(self, kind: str, grows: str | None) -> Finding | None:
        each = self._growths[kind].bytes_per_step()
        if each is None:
            return None
        where = "the card's memory" if kind == "card" else "this process's memory"
        message = f"{where} grows by {format_bytes(round(each))} a step and is not given back"
        message += f"; {grows}" if grows else "; no kind of Python object stands out, so what grows is held by a library"
        return Finding(cause="memory_creep", confidence=0.9, evidence={"bytes_per_step": each}, message=message)


def anonymous_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """Of this process, without mapped files; None where the system does not say."""
    try:
        line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[1]) * 1024


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
    core_wait: float = 0.30  # of the time; below that a neighbour costs less than the trouble of moving it


DEFAULT = Thresholds()


def long_enough_to_judge(window: Window, limits: Thresholds) -> bool:
    return window.steps >= limits.min_steps and (window.seconds >= limits.min_seconds or window.steps >= limits.many_steps)


def finding(
    cause: Cause, confidence: float, evidence: Mapping[str, float | None], message: str, remedy: SettingAdvice | None = None
) -> Finding:
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
        gain = advice.SettingAdvice(predicted_gain=round(0.9 / clock - 1, 2) if clock and clock < 0.9 else None)
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
    message = f"memory is nearly full ({format_percent(used)} of the card): a longer batch or an evaluation may not fit"
    evidence = {"used_share": used, "allocated_share": allocated}
    return finding("near_limit", confidence(max(used, allocated or 0.0), 0.88, 0.98), evidence, message, advice.less_memory(run))


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
    return finding("fragmentation", sure, evidence, message, advice.EXPANDABLE_SEGMENTS)


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
    return finding("pcie_bound", confidence(share, limits.pcie, 0.9), evidence, message, advice.less_traffic(run))


def memory_headroom(window: Window, run: RunFacts, limits: Thresholds, *, launch_bound: bool) -> Finding | None:
    """Unused memory is only worth a word where it can buy time: against accumulation, recomputation, or small kernels."""
    shares = memory_shares(window)
    if shares is None or shares[0] >= limits.headroom:
        return None
    remedy = advice.use_memory(shares[0], run, launch_bound=launch_bound)
    if remedy is None:
        return None
    message = f"{format_percent(1 - shares[0])} of the card's memory is never used"
    evidence = {"used_share": shares[0], "allocated_share": shares[1]}
    return finding("memory_headroom", confidence(-shares[0], -limits.headroom, -0.3), evidence, message, remedy)


def cpu_starved(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    """Other processes have the cores this run wants; None also where the kernel does not count the waiting."""
    wait, main = window.core_wait, window.main_thread_util
    if wait is None or wait < limits.core_wait:
        return None
    had = f"; it had {format_percent(main)} of one" if main is not None else ""
    message = (
        f"other processes take the CPU: the training thread waits {format_percent(wait)} of the time for a core{had}. "
        "End them, or give this run cores of its own"
    )
    facts = {"core_wait": wait, "main_thread_util": main, "preempted": window.preempted, "process_cores": window.process_cores}
    return finding("cpu_starved", confidence(wait, limits.core_wait, 0.6), facts, message)
