"""gpus.toml, read: one entry per card, with peaks computed from SMs, clocks and the architecture's rates.

peak = SMs × operations per SM and clock × clock. A MIG instance is an entry of its own: SMs for its peaks, memory slices for its bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfopt.hardware.names import words
from hfopt.units import MIB

if TYPE_CHECKING:
    from hfopt.schema import Gpu

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PCIE_BYTES_PER_S_PER_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""One direction, after 8b/10b (1, 2), 128b/130b (3 to 5) or FLIT (6) coding: PCI Express Base Specification 6.0."""


class Entry:
    """A card and every name it goes by. `figures` are the arguments of schema.Gpu, so that listing cards need not load the schema."""

    def __init__(self, figures: Mapping[str, Any], nvml_names: Iterable[str]) -> None:
        self.figures = figures
        self.names: tuple[str, ...] = (figures["name"], *nvml_names)

    @cached_property
    def gpu(self) -> Gpu:
        from hfopt.schema import Gpu

        return Gpu(**self.figures)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def spellings(self) -> tuple[frozenset[str], ...]:
        return tuple(words(name) for name in self.names)


@cache
def table() -> Mapping[str, Any]:
    """The file as it is, read once."""
    read: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
    return read


@cache
def entries() -> tuple[Entry, ...]:
    """Every card, in the file's order."""
    architectures = table()["architectures"]
    return tuple(_entry(card, architectures[card["architecture"]]) for card in table()["cards"])


@cache
def mig_entries() -> tuple[Entry, ...]:
    """The MIG instances of the cards that can be split, as cards of their own."""
    whole = {entry.name: entry for entry in entries()}
    return tuple(
        _instance(whole[name], profile, share, group)
        for group in table()["mig"]
        for name in group["cards"]
        for profile, share in group["profiles"].items()
    )


def driver_reserve_mib(memory_mib: int) -> float:
    """What the driver is taken to keep of a card's memory where no report says; gpus.toml says what it rests on."""
    reserve = table()["driver_reserve"]
    return float(min(reserve["fixed_mib"] + reserve["share"] * memory_mib, reserve["most_mib"]))


def _instance(card: Entry, profile: str, share: tuple[int, int, int], group: Mapping[str, Any]) -> Entry:
    """An instance's share of the card: SMs for the peaks, memory slices for the bandwidth."""
    mib, sms, slices = share
    of_card = card.figures
    figures = {
        **of_card,
        "name": f"{card.name} MIG {profile}",
        "memory_bytes": mib * MIB,
        "usable_bytes": mib * MIB,
        "sms": sms,
        "bandwidth_bytes_per_s": of_card["bandwidth_bytes_per_s"] * slices / group["slices"],
        "peak_flops": {precision: peak * sms / of_card["sms"] for precision, peak in of_card["peak_flops"].items()},
        "nvlink_bytes_per_s": None,
        "mig": True,
        "source": group["source"],
    }
    return Entry(figures, [f"{name} MIG {profile}" for name in card.names[1:]])


def _entry(card: Mapping[str, Any], architecture: Mapping[str, Any]) -> Entry:
    boost_hz, tensor_hz = card["boost_mhz"] * 1e6, card.get("tensor_mhz", card["boost_mhz"]) * 1e6
    figures = {
        "name": card["name"],
        "memory_bytes": card["memory_mib"] * MIB,
        "usable_bytes": int(card.get("usable_mib", card["memory_mib"] - driver_reserve_mib(card["memory_mib"])) * MIB),
        "capability": (architecture["capability"][0], architecture["capability"][1]),
        "sms": card["sms"],
        "bandwidth_bytes_per_s": card["bandwidth_gb_s"] * 1e9,
        "peak_flops": {
            precision: card["sms"] * rate * (boost_hz if precision == "fp32" else tensor_hz)
            for precision, rate in architecture["flops_per_sm_clock"].items()
        },
        "power_limit_w": card["power_w"],
        "pcie_bytes_per_s": PCIE_BYTES_PER_S_PER_LANE[card["pcie_generation"]] * card["pcie_lanes"],
        "nvlink_bytes_per_s": card["nvlink_gb_s"] * 1e9 if "nvlink_gb_s" in card else None,
        "nvlink_by_bridge": card.get("nvlink_bridge", False),
        "catalog_name": card["name"],
        "source": card["source"],
    }
    return Entry(figures, card.get("nvml", ()))
