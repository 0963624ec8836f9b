"""The clock a card sustains: the highest at which a step draws no more than the board may.

Over a step the board draws

    static share of its limit
    + busy SM clocks × energy of an SM and clock × (1 + width / W) × (V / V0)²
    + bytes moved × energy of a byte

where the width is how many 16-bit operations an SM's matrix units do in a clock (a float32 counts as four, a TF32 as two), and the voltage
rises with the clock above a knee. Whatever the precision, a matrix product then costs about the same energy in each clock, which is what
cards of 70 to 1000 W show when others multiply large matrices on them (benchmarks/data/published_matmul.csv; `matmul_power.py` fits the
constants there and leaves each card out in turn: no training row has a part in them). Known limits: heat and the luck of the single
chip are not known, bytes found in a cache are charged like those of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.hardware.catalog import fp32_per_sm_clock
from hfopt.schema import Gpu

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
    voltage_knee: float
    voltage_slope: float

    def joules(self, *, plain_s: float, weighted_s: float, moved_bytes: float, clock: float) -> float:
        """Energy above the static part: SMs busy for `plain_s`, in it matrix products for `weighted_s` (seconds × width / W)."""
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
