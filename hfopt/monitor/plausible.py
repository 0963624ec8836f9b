"""A reading that cannot be (590 W on a 115 W board) is named, so that no average takes it in."""

from __future__ import annotations

from dataclasses import replace

from hfopt.schema import GpuReading

_MOST_POWER_W = 3000.0  # above any single board sold
_MOST_OVER_LIMIT = 1.5  # averaged draw overshoots the limit by a few percent, never by half
_MOST_CLOCK_MHZ = 5000.0
_COLDEST_C, _HOTTEST_C = -10.0, 130.0  # boards switch off well before
_MOST_PCIE_BYTES_PER_S = 256e9  # PCIe 7.0 ×16


def flagged(reading: GpuReading) -> GpuReading:
    """The reading with the names of its impossible values in `suspect`."""
    bad = set(reading.suspect) | {name for name, wrong in _checks(reading).items() if wrong}
    return replace(reading, suspect=tuple(sorted(bad))) if bad else reading


def _checks(reading: GpuReading) -> dict[str, bool]:
    limit_w = reading.power_limit_w * _MOST_OVER_LIMIT if reading.power_limit_w else _MOST_POWER_W
    top_clock = reading.max_sm_clock_mhz * 1.2 if reading.max_sm_clock_mhz else _MOST_CLOCK_MHZ
    return {
        "sm_util": _outside(reading.sm_util, 0.0, 1.0),
        "memory_util": _outside(reading.memory_util, 0.0, 1.0),
        "used_bytes": _outside(reading.used_bytes, 0, reading.total_bytes),
        "own_used_bytes": _outside(reading.own_used_bytes, 0, reading.total_bytes),
        "power_w": _outside(reading.power_w, 0.0, limit_w),
        "temperature_c": _outside(reading.temperature_c, _COLDEST_C, _HOTTEST_C),
        "sm_clock_mhz": _outside(reading.sm_clock_mhz, 0.0, top_clock),
        "pcie_rx_bytes_per_s": _outside(reading.pcie_rx_bytes_per_s, 0.0, _MOST_PCIE_BYTES_PER_S),
        "pcie_tx_bytes_per_s": _outside(reading.pcie_tx_bytes_per_s, 0.0, _MOST_PCIE_BYTES_PER_S),
    }


def _outside(value: float | None, low: float, high: float | None) -> bool:
    return value is not None and (value < low or (high is not None and value > high) or value != value)
