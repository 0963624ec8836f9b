"""The table cannot hold a typo: what a card states twice must agree; and every name a card goes by finds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.schema import Gpu

TABLE: Mapping[str, Any] = catalog.table()
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


@each_gpu
def test_a_cards_own_name_finds_it(gpu: Gpu) -> None:
    assert catalog.find(gpu.name) is gpu
    assert catalog.find(gpu.name.upper().replace(" ", "-")) is gpu


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("3070", "GeForce RTX 3070"),
        ("rtx 4060 laptop", "GeForce RTX 4060 Laptop"),
        ("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"),
        ("Tesla T4", "Tesla T4"),
        ("h100 sxm", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("gtx1080ti", "GeForce GTX 1080 Ti"),
        ("4060ti 16gb", "GeForce RTX 4060 Ti 16GB"),
    ],
)
def test_forgiving_names(asked: str, found: str) -> None:
    assert catalog.find(asked).name == found


def test_a_name_for_several_memory_sizes_is_refused_with_the_list() -> None:
    with pytest.raises(HardwareError) as caught:
        catalog.find("a100")
    assert "A100 SXM 40GB" in str(caught.value) and "A100 PCIe 80GB" in str(caught.value)
