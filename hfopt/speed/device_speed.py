"""How fast a device is, and how far that may be off: a card by its peaks, shares and the clock its power sustains; a CPU by measuring it.

A range holds eight of ten published rates whose source had no part in the shares. Three questions, three figures
(benchmarks/speed_holdout.py): one rate; two settings on one card, where most of the error cancels; one job on two cards, where the cards'
own error stays. A card without published training rows is less known: what the power rule missed of cards it had not seen
(benchmarks/matmul_power.py) is added. A kind of work without such rows (convolutions) is taken for half as unsure again, by reasoning
alone.

Over a step the board draws

    static share of its limit
    + busy SM clocks × energy of an SM and clock × (1 + width / W) × (V / V0)²
    + bytes moved × energy of a byte

where the width is how many 16-bit operations an SM's matrix units do in a clock (a float32 counts as four, a TF32 as two), and the voltage
rises with the clock above a knee. The width counts for the time that the multiplications take at the rate of large products: a product
that waits for its waves, its operands or its writes draws what any other kernel draws. Whatever the precision, a matrix product then costs
about the same energy in each clock, which is what cards of 70 to 1000 W show when others multiply large matrices on them
(benchmarks/data/published_matmul.csv; `matmul_power.py` fits the constants there and leaves each card out in turn: no training row has a
part in them). Known limits: heat and the luck of the single chip are not known, bytes found in a cache are charged like those of the
memory.

A card's peaks and bandwidth times the shares of `efficiency.toml`, its board's power and what the host needs to launch a kernel, in one
value the step-time model reads.

`speed_of` needs the card's facts (bandwidth, SMs, dense peaks); a card the catalog does not know has no speed, and None says so.

The speed of this CPU, measured in a fraction of a second: a matmul, a large copy, and many tiny operations. On the CPU host and device are
one, so launching and computing add up. The matmul gives the arithmetic rate, the copy the bandwidth, the tiny operations what every
operation costs besides. Known limits: clocks and caches shift from run to run, and other processes take their share, so ratios between
settings hold better than rates.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

from hfopt.compat.versions import installed_torch
from hfopt.hardware.catalog import fp32_per_sm_clock
from hfopt.schema import Gpu

toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
UNSEEN_SHARE = 0.3  # of a step in a kind of work that no published row has: then the step is of that kind


@cache
def efficiency() -> dict[str, Any]:
    parsed: dict[str, Any] = toml.loads((files("hfopt.speed") / "efficiency.toml").read_text(encoding="utf-8"))
    return parsed


def card_error(card: str) -> float:
    """The error that eight of ten rates on this card stay within."""
    ranges = efficiency()["ranges"]
    return float(ranges["rate"] if card in ranges["cards"] else math.hypot(ranges["rate"], ranges["unseen_card"]))


def rate_error(card_error: float, shares: Mapping[str, float]) -> float:
    """For a step with these shares of its time by kind of work."""
    ranges = efficiency()["ranges"]
    unseen = sum(shares.get(kind, 0.0) for kind in ranges["unseen_kinds"])
    return card_error * float(ranges["unseen_work"] if unseen > UNSEEN_SHARE else 1.0)


def settings_error() -> float:
    """Of the ratio between two settings on one card."""
    return float(efficiency()["ranges"]["settings"])


def cards_error(*cards: str) -> float:
    """Of the ratio between two cards at one job; each of them without rows adds what it is less known by."""
    ranges = efficiency()["ranges"]
    unseen = sum(card not in ranges["cards"] for card in cards)
    return math.hypot(float(ranges["between_cards"]), float(ranges["unseen_card"]) * math.sqrt(unseen))


def limits(rate: float, error: float) -> tuple[float, float]:
    return rate / (1 + error), rate * (1 + error)


LOWEST_CLOCK, HALVINGS = 0.1, 14
WIDTHS = {"fp32": 4.0, "tf32": 2.0}
"""16-bit operations that one operation weighs, where it is not one of 16 bits itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """A card's power: its limit, and what its SMs and its memory take of it. Clocks are shares of the one its peaks are quoted at."""

    limit_w: float
    static_w: float
    sms: int
    clock_hz: float
    highest_clock: float
    sm_joules: float  # of an SM and clock without matrix products
    doubling_width: float  # 16-bit operations of an SM and clock that take as much again
    byte_joules: float
    reached: float  # of the peak for its arithmetic, while an SM multiplies
    voltage_knee: float
    voltage_slope: float

    def joules(self, *, plain_s: float, weighted_s: float, moved_bytes: float, clock: float) -> float:
        """Energy above the static part: SMs busy for `plain_s`, in it multiplying for `weighted_s` (seconds × width / W)."""
        voltage = 1 + self.voltage_slope * max(0.0, clock - self.voltage_knee)
        per_second = self.sms * self.clock_hz * clock * self.sm_joules * voltage**2
        return per_second * (plain_s + weighted_s) + moved_bytes * self.byte_joules

    def width_weight(self, flops_per_s: float, kind: str) -> float:
        """Width / W of products in this arithmetic, by the card's peak for it."""
        return flops_per_s / (self.sms * self.clock_hz) * WIDTHS.get(kind, 1.0) / self.doubling_width


def board_of(gpu: Gpu, constants: Mapping[str, Any]) -> Board | None:
    """None where the card's limit, its SMs or its clock are not known: then nothing holds its clock."""
    fp32, rate = gpu.peak_flops.get("fp32"), fp32_per_sm_clock(gpu.capability)
    if not gpu.power_limit_w or not gpu.sms or not fp32 or rate is None or gpu.capability is None:
        return None
    return Board(
        limit_w=gpu.power_limit_w,
        static_w=constants["static_share"] * gpu.power_limit_w,
        sms=gpu.sms,
        clock_hz=fp32 / (gpu.sms * rate),
        highest_clock=constants["geforce_headroom"] if "GeForce" in gpu.name else 1.0,
        sm_joules=_process(gpu.capability, constants["processes"])["nj_per_sm_clock"] * 1e-9,
        doubling_width=constants["doubling_width"],
        byte_joules=constants["pj_per_byte"] * 1e-12,
        reached=constants["reached"],
        voltage_knee=constants["voltage_knee"],
        voltage_slope=constants["voltage_slope"],
    )


def sustained_clock(board: Board, average_w: Callable[[float], float]) -> float:
    """The highest clock at which the step's average power stays within the limit; `average_w` is asked at shares of the nominal clock."""
    if average_w(board.highest_clock) <= board.limit_w:
        return board.highest_clock
    low, high = LOWEST_CLOCK, board.highest_clock
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if average_w(middle) <= board.limit_w else (low, middle)
    return low


def _process(capability: tuple[int, int], processes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The process a capability was made in; later ones are taken for the latest known."""
    name = f"{capability[0]}.{capability[1]}"
    found: Mapping[str, Any] = next((one for one in processes.values() if name in one["capabilities"]), list(processes.values())[-1])
    return found


USUAL_CLOCK_HZ = 1.5e9  # of a card whose own is not known
FLASH_2 = (2, 2)  # the torch whose own flash attention is FlashAttention-2 (its release notes)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCost:
    """Seconds the host spends per launched kernel, per wait for the device, per micro-batch and per optimizer step."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    sync_s: float
    micro_batch_s: float
    step_s: float

    def scaled(self, factor: float) -> HostCost:
        return HostCost(**{field.name: getattr(self, field.name) * factor for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A device as the step-time model sees it. Rates are reachable ones at the nominal clock: peak × efficiency."""

    name: str
    matmul_flops: Mapping[str, float]  # by arithmetic: fp32, tf32, fp16, bf16
    peak_flops: Mapping[str, float]  # the data sheet's, for MFU
    flash_share: float  # of the matmul rate
    efficient_share: float  # the memory-efficient attention kernel's
    conv_share: float
    memory_bytes_per_s: float
    reduction_bytes_per_s: float
    sms: int
    kernel_floor_s: float
    host: HostCost
    tile_element_s: float = 0.0  # of an SM at the nominal clock, for each element of a tile besides multiplying
    asynchronous: bool = True  # the host runs ahead of the device
    link_bytes_per_s: float | None = None  # between devices, one direction
    board: Board | None = None  # None: nothing is known to hold the clock
    card_error: float | None = None  # that eight of ten rates stay within; None: not known


def architecture(capability: tuple[int, int] | None) -> tuple[str, dict[str, Any]]:
    """The row for a capability, filled up with what all share: (name of the architecture, its shares)."""
    rows: dict[str, dict[str, Any]] = efficiency()["architectures"]
    wanted = "8.0" if capability is None else f"{capability[0]}.{capability[1]}"
    name = next((key for key, row in rows.items() if wanted in row["capabilities"]), None)
    if name is None:
        major = int(wanted.split(".")[0])
        name = next((key for key, row in rows.items() if any(c.startswith(f"{major}.") for c in row["capabilities"])), "hopper")
    shared: dict[str, Any] = efficiency()["shared"]
    return name, {**shared, **rows[name], "matmul": {**shared["matmul"], **rows[name].get("matmul", {})}}


def speed_of(gpu: Gpu, *, torch_version: tuple[int, int] | None = None) -> Speed | None:
    """The card's speed under this version of torch (None: the installed one); None when the catalog has no peak or bandwidth for it."""
    fp32 = gpu.peak_flops.get("fp32")
    if gpu.bandwidth_bytes_per_s is None or fp32 is None:
        return None
    version = torch_version or installed_torch()
    _, shares = architecture(gpu.capability)
    kernel, matmul = efficiency()["kernel"], shares["matmul"]
    board = board_of(gpu, efficiency()["power"])
    flash = shares["flash"] if version >= FLASH_2 else min(shares["flash"], shares["flash_before_2"])
    return Speed(
        name=gpu.name,
        matmul_flops={kind: gpu.peak_flops[kind] * share for kind, share in matmul.items() if kind in gpu.peak_flops},
        peak_flops=dict(gpu.peak_flops),
        flash_share=flash / matmul["fp16"],
        efficient_share=shares["efficient"] / matmul["fp16"],
        conv_share=kernel["conv_share"],
        memory_bytes_per_s=gpu.bandwidth_bytes_per_s * shares["memory"],
        reduction_bytes_per_s=gpu.bandwidth_bytes_per_s * shares["reduction"],
        sms=gpu.sms or max(1, round(fp32 / 1.6e11)),
        kernel_floor_s=kernel["floor_us"] * 1e-6,
        host=host_cost(version),
        tile_element_s=kernel["tile_element_clocks"] / (board.clock_hz if board else USUAL_CLOCK_HZ),
        link_bytes_per_s=gpu.nvlink_bytes_per_s or gpu.pcie_bytes_per_s,
        board=board,
        card_error=card_error(gpu.catalog_name or gpu.name),
    )


def host_cost(torch_version: tuple[int, int]) -> HostCost:
    """Seconds per launch under this version of torch."""
    host = efficiency()["host"]
    slower = host["before_torch_2"] if torch_version < (2, 0) else 1.0
    return HostCost(**{field.name: host[field.name.removesuffix("_s") + "_us"] for field in fields(HostCost)}).scaled(1e-6 * slower)


REPEATS = 5


def cpu_speed() -> Speed:
    """Measured now, with the threads torch would use; where others take their cores, no slower than one thread in its own time."""
    import torch

    left, right = torch.rand(512, 512), torch.rand(512, 512)
    flops = 2 * 512**3 / _best(lambda: left @ right)
    source = torch.rand(4 << 20)
    target = torch.empty_like(source)
    bandwidth = 2 * source.numel() * 4 / _best(lambda: target.copy_(source))
    op_s = _tiny_op_s()
    return Speed(
        name="this CPU",
        matmul_flops={"fp32": flops, "bf16": flops, "fp16": flops},
        peak_flops={"fp32": flops},
        flash_share=0.5,
        efficient_share=0.5,
        conv_share=0.5,
        memory_bytes_per_s=bandwidth,
        reduction_bytes_per_s=bandwidth,
        sms=1,
        kernel_floor_s=0.0,
        host=HostCost(forward_s=2 * op_s, backward_s=2 * op_s, optimizer_s=2 * op_s, sync_s=0.0, micro_batch_s=0.0, step_s=1e-3),
        asynchronous=False,
    )


def _tiny_op_s() -> float:
    import torch

    one = torch.zeros(8)

    def many() -> None:
        for _ in range(200):
            one.add(1)

    return _best(many) / 200


def _best(run: Callable[[], object]) -> float:
    """The fastest of a few runs: everything else on the machine only ever slows it. Threads that wait for one whose core is taken were
    seen to be 40 times as slow, so a run of one thread counts too, by the time that it had a core."""
    import torch

    threads = torch.get_num_threads()
    seconds = [_fastest(run, time.perf_counter)]
    torch.set_num_threads(1)
    try:
        seconds.append(_fastest(run, time.thread_time))
    finally:
        torch.set_num_threads(threads)
    return min(seconds)


def _fastest(run: Callable[[], object], clock: Callable[[], float]) -> float:
    run()
    seconds = []
    for _ in range(REPEATS):
        started = clock()
        run()
        seconds.append(clock() - started)
    return min(seconds)
