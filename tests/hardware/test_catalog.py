"""Every name a card goes by finds it, an ambiguous or unknown one gets the nearest, and nothing else happens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.hardware.catalog import shorthand
from hfopt.schema import Gpu

each_gpu = pytest.mark.parametrize("gpu", catalog.cards(), ids=lambda gpu: gpu.name)


@each_gpu
def test_a_cards_own_name_finds_it(gpu: Gpu) -> None:
    assert catalog.find(gpu.name) is gpu
    assert catalog.find(gpu.name.upper().replace(" ", "-")) is gpu
    assert catalog.find(shorthand(gpu.name)) is gpu


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
        ("RTX4090", "GeForce RTX 4090"),
        ("4090 24GB", "GeForce RTX 4090"),
        ("geforce_rtx_3060", "GeForce RTX 3060"),
        ("3060 8 GB", "GeForce RTX 3060 8GB"),
        ("RTX 3070 mobile", "GeForce RTX 3070 Laptop"),
        ("3080 ti laptop", "GeForce RTX 3080 Ti Laptop"),
        ("4070 TI SUPER", "GeForce RTX 4070 Ti Super"),
        ("4070tisuper", "GeForce RTX 4070 Ti Super"),
        ("2080s", "GeForce RTX 2080 Super"),
        ("titan rtx", "TITAN RTX"),
        ("a6000", "RTX A6000"),
        ("rtx 6000 ada", "RTX 6000 Ada"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("t4", "Tesla T4"),
        ("v100-sxm2-32gb", "Tesla V100 SXM2 32GB"),
        ("H100-SXM5-80GB", "H100 SXM"),
        ("h200", "H200 SXM"),
        ("orin nano", "Jetson Orin Nano 8GB"),
        ("a30 1g.6gb", "A30 MIG 1g.6gb"),
        ("NVIDIA A100-SXM4-80GB MIG 2g.20gb", "A100 SXM 80GB MIG 2g.20gb"),
    ],
)
def test_forgiving_names(asked: str, found: str) -> None:
    assert catalog.find(asked).name == found


def test_a_name_for_several_memory_sizes_is_refused_with_the_list() -> None:
    with pytest.raises(HardwareError) as caught:
        catalog.find("a100")
    assert "A100 SXM 40GB" in str(caught.value) and "A100 PCIe 80GB" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "among"), [("h100", "H100 NVL"), ("4060 ti", "GeForce RTX 4060 Ti 16GB"), ("rtx 6000", "Quadro RTX 6000")]
)
def test_other_ambiguous_names(asked: str, among: str) -> None:
    with pytest.raises(HardwareError, match=among):
        catalog.find(asked)


def test_form_factors_of_one_memory_are_taken_for_the_slowest_and_it_is_said() -> None:
    match = catalog.lookup("A100-80GB")
    assert match.gpu.name == "A100 PCIe 80GB"
    assert match.note is not None and "A100 SXM 80GB" in match.note


@pytest.mark.parametrize(
    ("asked", "is_"),
    [
        ("A100-80", "A100 PCIe 80GB"),
        ("A100 SXM 40", "A100 SXM 40GB"),
        ("v100 32", "Tesla V100 PCIe 32GB"),
        ("4060 ti 16", "GeForce RTX 4060 Ti 16GB"),
    ],
)
def test_a_number_behind_the_name_is_its_memory(asked: str, is_: str) -> None:
    assert catalog.find(asked).name == is_


def test_so_many_cards_are_asked_for_otherwise() -> None:
    with pytest.raises(catalog.UnknownCardError) as caught:
        catalog.find("8×A100-80")
    assert caught.value.hint == "several cards: --gpu 'A100-80' --num-gpus 8"


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("RTX 3071", "GeForce RTX 3070"),
        ("3090 16gb", "GeForce RTX 3090"),
        ("A100O", "A100 SXM 40GB"),
        ("titan", "TITAN RTX"),
        ("RTX 9999", "GeForce RTX 4090"),
    ],
)
def test_an_unknown_name_gets_the_nearest(asked: str, near: str) -> None:
    with pytest.raises(catalog.UnknownCardError) as caught:
        catalog.find(asked)
    assert asked in str(caught.value) and near in (caught.value.hint or "")


@pytest.mark.parametrize("odd", ["", "   ", "80gb", "gpu", "nvidia", "\x00", "💥", "a" * 10_000, "(((", "ti", "laptop"])
def test_odd_names_are_refused_and_never_crash(odd: str) -> None:
    with pytest.raises(HardwareError):
        catalog.find(odd)


@given(st.text(max_size=40))
def test_any_text_finds_a_card_or_is_refused(text: str) -> None:
    try:
        assert catalog.find(text) is not None
    except HardwareError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        ("MI300X", "AMD"), ("Radeon RX 7900 XTX", "AMD"), ("Gaudi 3", "Intel"), ("Arc B580", "Intel"), ("TPU v5e", "Google"),
        ("trn2", "Amazon"), ("Apple M3", "Apple"), ("m4 max", "Apple"), ("Ascend 910B", "Huawei"),
    ],
)  # fmt: skip
def test_an_accelerator_of_another_vendor_is_named_and_no_card_is_proposed_for_it(name: str, vendor: str) -> None:
    with pytest.raises(HardwareError, match=f"of {vendor}: only NVIDIA's cards") as raised:
        catalog.find(name)
    assert "--vram" in str(raised.value.hint)


def test_no_card_of_the_catalog_is_taken_for_another_vendors() -> None:
    for entry in catalog.entries():
        assert not any(re.search(named, entry.name.lower()) for named in catalog.OTHER_VENDORS.values())
