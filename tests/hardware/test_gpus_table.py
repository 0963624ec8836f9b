"""The table cannot hold a typo: what a card states twice must agree, and what it states once must be plausible for its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hfopt.hardware import catalog
from hfopt.hardware.catalog import CatalogEntry, driver_reserve_mib, mig_entries, table
from hfopt.schema import Gpu

TABLE: Mapping[str, Any] = table()
CARDS: list[dict[str, Any]] = TABLE["cards"]
each_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card["name"])
each_gpu = pytest.mark.parametrize("gpu", catalog.cards(), ids=lambda gpu: gpu.name)


@each_card
def test_the_float32_figure_is_sms_times_clock(card: dict[str, Any]) -> None:
    rate = TABLE["architectures"][card["architecture"]]["flops_per_sm_clock"]["fp32"]
    assert card["sms"] * rate * card["boost_mhz"] * 1e-6 == pytest.approx(card["fp32_tflops"], rel=0.013)


@each_card
def test_the_bandwidth_is_bus_width_times_data_rate(card: dict[str, Any]) -> None:
    assert card["bus_bits"] * card["memory_gbps"] / 8 == pytest.approx(card["bandwidth_gb_s"], rel=0.012)


@pytest.mark.parametrize("card", [card for card in CARDS if "fp16_tflops" in card], ids=lambda card: card["name"])
def test_a_printed_half_precision_figure_is_the_architectures_rate(card: dict[str, Any]) -> None:
    assert catalog.find(card["name"]).peak_flops["fp16"] * 1e-12 == pytest.approx(card["fp16_tflops"], rel=0.013)


def test_there_are_enough_cards_each_with_its_facts() -> None:
    assert len(catalog.cards()) >= 100
    assert len({gpu.name for gpu in catalog.cards()}) == len(catalog.cards())
    for gpu in catalog.cards():
        assert gpu.source and gpu.capability and gpu.power_limit_w and gpu.pcie_bytes_per_s


@pytest.mark.parametrize("architecture", TABLE["architectures"])
def test_rates_of_an_architecture_stand_in_the_usual_ratios(architecture: str) -> None:
    """bf16 is as fast as fp16, TF32 half of it, fp8 twice; none before its time; tensor cores are never slower than the others."""
    rates, capability = (TABLE["architectures"][architecture][key] for key in ("flops_per_sm_clock", "capability"))
    assert ("bf16" in rates) == ("tf32" in rates) == (capability >= [8, 0])
    assert ("fp8" in rates) == (capability >= [8, 9])
    assert rates["fp16"] >= rates["fp32"]
    if "bf16" in rates:
        assert rates["bf16"] == rates["fp16"] == 2 * rates["tf32"]
    if "fp8" in rates:
        assert rates["fp8"] == 2 * rates["fp16"]


@pytest.mark.parametrize("family", ["turing", "ampere", "ada", "blackwell"])
def test_geforce_cards_accumulate_in_float32_at_half_rate(family: str) -> None:
    rates = [TABLE["architectures"][f"{family}_{kind}"]["flops_per_sm_clock"]["fp16"] for kind in ("geforce", "pro")]
    assert 2 * rates[0] == rates[1]


@pytest.mark.parametrize(
    "card", [card for card in CARDS if card["bus_bits"] <= 512 and "Jetson" not in card["name"]], ids=lambda card: card["name"]
)
def test_the_memory_is_a_whole_number_of_chips(card: dict[str, Any]) -> None:
    """The driver reports the chips' size less the little that firmware takes, and less 1/16 where ECC is on; chips fill the bus evenly."""
    per_chip_gib = [-(-size_mib // 1024) / (card["bus_bits"] / 32) for size_mib in (card["memory_mib"], card["memory_mib"] * 16 // 15)]
    assert any(size in (0.5, 1, 1.5, 2, 3, 4, 6) for size in per_chip_gib), per_chip_gib


@each_card
def test_power_and_links_are_of_their_generation(card: dict[str, Any]) -> None:
    """No card draws less than 1 or more than 13.5 W per SM; PCIe goes by generation; NVLink comes in links of known speed."""
    assert 1.0 <= card["power_w"] / card["sms"] <= 13.5
    assert card["pcie_lanes"] in (4, 8, 16)
    capability = TABLE["architectures"][card["architecture"]]["capability"]
    newest = 3 if capability < [8, 0] else 4 if capability < [9, 0] else 5
    assert card["pcie_generation"] == newest or card["architecture"] == "orin"
    assert card.get("nvlink_gb_s") in (None, 25, 50, 56.25, 80, 100, 150, 200, 300, 450, 900)


@each_gpu
def test_a_program_sees_a_little_less_than_the_driver(gpu: Gpu) -> None:
    assert gpu.usable_bytes is not None
    assert 0.9 < gpu.usable_bytes / gpu.memory_bytes < 1
    assert gpu.available_bytes == gpu.usable_bytes


@pytest.mark.parametrize("card", [card for card in CARDS if "usable_mib" in card], ids=lambda card: card["name"])
def test_the_rule_for_the_drivers_reserve_bears_out_the_reports(card: dict[str, Any]) -> None:
    kept = card["memory_mib"] - card["usable_mib"]
    assert kept <= driver_reserve_mib(card["memory_mib"]) + 20


@pytest.mark.parametrize("entry", mig_entries(), ids=lambda entry: entry.name)
def test_a_mig_instance_is_a_part_of_its_card(entry: CatalogEntry) -> None:
    gpu = entry.gpu
    assert gpu.catalog_name is not None and gpu.sms is not None and gpu.bandwidth_bytes_per_s is not None
    card = catalog.find(gpu.catalog_name)
    assert card.sms is not None and card.bandwidth_bytes_per_s is not None
    assert gpu.mig and gpu.memory_bytes < card.memory_bytes and gpu.sms <= card.sms
    compute, memory = (int(part) for part in gpu.name.split()[-1].removesuffix("gb").split("g."))
    assert memory * 0.94 <= gpu.memory_bytes / 2**30 <= memory
    assert gpu.bandwidth_bytes_per_s / card.bandwidth_bytes_per_s == pytest.approx(gpu.memory_bytes / card.memory_bytes, rel=0.06)
    assert compute * 14 <= gpu.sms <= compute * 26
    for name in entry.names:
        assert catalog.find(f"NVIDIA {name}") is gpu
