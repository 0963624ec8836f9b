"""What detect() makes of a driver's answers, and named() of a name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_standin import NvmlStandin

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.hardware.catalog import CatalogEntry, entries
from hfopt.hardware.detect import detect, named
from hfopt.schema import Gpu
from hfopt.units import GIB, MIB

DRIVER_NOT_LOADED = 9


@pytest.fixture
def driver(nvml_standin: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> NvmlStandin:
    nvml_standin.use(monkeypatch)
    return nvml_standin


def test_one_card_with_the_drivers_memory_and_the_catalogs_speed(driver: NvmlStandin) -> None:
    driver.card(0, used_mib=1000, power_limit_mw=180_000, pcie_lanes=8)
    found = detect()
    (gpu,) = found.gpus
    known = catalog.find("3070")
    assert gpu.name == "NVIDIA GeForce RTX 3070" and gpu.catalog_name == known.name and gpu.uuid == driver.uuid(0)
    assert gpu.memory_bytes == 8192 * MIB and gpu.usable_bytes == (8192 - 225) * MIB
    assert gpu.free_bytes == (8192 - 225 - 1000) * MIB  # what another process holds is not ours
    assert gpu.peak_flops == known.peak_flops and gpu.bandwidth_bytes_per_s == known.bandwidth_bytes_per_s
    assert gpu.power_limit_w == 180 and gpu.pcie_bytes_per_s == pytest.approx(8 * 1.969e9)
    assert (found.driver_version, found.cuda_version) == ("570.86.15", "12.8")
    assert found.notes == () and not found.hypothetical


def test_eight_cards_and_a_choice_of_them(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(8):
        driver.card(index, name="NVIDIA A100-SXM4-80GB", capability=80, total_mib=81920, nvlinks=12)
    found = detect()
    assert [gpu.index for gpu in found.gpus] == list(range(8))
    assert {gpu.nvlink_bytes_per_s for gpu in found.gpus} == {300e9}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2")
    chosen = detect()
    assert [gpu.index for gpu in chosen.gpus] == [5, 2]
    assert any("hides 6 of 8" in note for note in chosen.notes)


def test_a_card_without_a_bridge_has_no_nvlink(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA GeForce RTX 3090", total_mib=24576)
    assert catalog.find("3090").nvlink_bytes_per_s is not None
    assert detect().gpus[0].nvlink_bytes_per_s is None


def test_hidden_cards_leave_the_cpu(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.card(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = detect()
    assert found.gpus == () and found.smallest is None
    assert any("CUDA_VISIBLE_DEVICES=''" in note for note in found.notes)


def test_a_mig_instance_has_its_share(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.card(0, name="NVIDIA A100-SXM4-40GB", capability=80, total_mib=40960, mig=1)
    driver.instance(0, 0, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", sms=14, total_mib=4864)
    driver.instance(0, 1, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", sms=42, total_mib=19968)
    whole = catalog.find("A100 SXM 40GB")
    first = detect()
    assert [gpu.memory_bytes for gpu in first.gpus] == [4864 * MIB]
    assert any("MIG" in note for note in first.notes)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(driver.settings["0/1.uuid"]))
    (gpu,) = detect().gpus
    assert gpu.mig and gpu.sms == 42 and gpu.capability == (8, 0) and gpu.memory_bytes == 19968 * MIB
    assert gpu.peak_flops["bf16"] == pytest.approx(whole.peak_flops["bf16"] * 42 / 108)
    assert gpu.bandwidth_bytes_per_s is not None and whole.bandwidth_bytes_per_s is not None
    assert gpu.bandwidth_bytes_per_s / whole.bandwidth_bytes_per_s == pytest.approx(0.5, abs=0.02)


def test_a_mig_instance_goes_by_its_older_name_too(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.card(0, name="NVIDIA A100-SXM4-40GB", capability=80, total_mib=40960, mig=1)
    driver.instance(0, 0, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", sms=14, total_mib=4864, gpu_instance=7, compute_instance=0)
    driver.instance(0, 1, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", sms=42, total_mib=19968, gpu_instance=2, compute_instance=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"MIG-{driver.uuid(0)}/2/0")
    assert [gpu.sms for gpu in detect().gpus] == [42]


def test_a_mig_instance_of_a_card_outside_the_catalog_is_still_one(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA A100-SXM-64GB", capability=80, total_mib=65536, mig=1)
    driver.instance(0, 0, name="NVIDIA A100-SXM-64GB MIG 1g.8gb", sms=14, total_mib=7936)
    (gpu,) = detect().gpus
    assert gpu.mig and gpu.catalog_name is None and gpu.memory_bytes == 7936 * MIB


def test_a_mig_instance_that_does_not_tell_its_sms_is_priced_by_memory(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA A100-SXM4-40GB", capability=80, total_mib=40960, mig=1)
    driver.instance(0, 0, name="NVIDIA A100-SXM4-40GB MIG 2g.10gb", total_mib=10240)
    (gpu,) = detect().gpus
    assert gpu.sms is None
    assert gpu.peak_flops["bf16"] == pytest.approx(catalog.find("A100 SXM 40GB").peak_flops["bf16"] / 4)


def test_one_product_name_for_two_memory_sizes(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA GeForce RTX 4060 Ti", capability=89, total_mib=16380)
    driver.card(1, name="NVIDIA GeForce RTX 4060 Ti", capability=89, total_mib=8188)
    assert {gpu.memory_bytes // MIB: gpu.catalog_name for gpu in detect().gpus} == {
        16380: "GeForce RTX 4060 Ti 16GB",
        8188: "GeForce RTX 4060 Ti 8GB",
    }


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_every_name_nvml_gives_a_card_is_known(entry: CatalogEntry) -> None:
    for name in entry.names[1:] or entry.names:
        for product in (f"NVIDIA {name}", name, f"NVIDIA {name.removesuffix(' GPU')} GPU"):
            found = catalog.identify(product, entry.gpu.memory_bytes)
            assert found is not None and found.memory_bytes == entry.gpu.memory_bytes


@pytest.mark.parametrize(
    ("product", "mib", "card"),
    [
        ("NVIDIA T4", 15360, "Tesla T4"),  # sold as Tesla T4
        ("GeForce GTX 1080 Ti", 11178, "GeForce GTX 1080 Ti"),  # drivers before 465, and totals before 510
        ("NVIDIA GeForce RTX 2060 SUPER", 8192, "GeForce RTX 2060 Super"),
        ("NVIDIA GeForce RTX 2060", 12288, "GeForce RTX 2060 12GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "GeForce RTX 4090 Laptop"),
        ("NVIDIA H100 PCIe", 81559, "H100 PCIe"),
        ("NVIDIA A100 80GB PCIe", 81920, "A100 PCIe 80GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTX PRO 6000 Blackwell Workstation"),
        ("NVIDIA RTX 6000 Ada Generation", 46068, "RTX 6000 Ada"),  # with ECC on
        ("NVIDIA RTX 6001", 49140, None),
    ],
)
def test_product_names_as_nvml_writes_them(product: str, mib: int, card: str | None) -> None:
    found = catalog.identify(product, mib * MIB)
    assert (found.name if found else None) == card


def test_different_cards_the_smallest_rules_and_it_is_said(driver: NvmlStandin) -> None:
    driver.card(0)
    driver.card(1, name="NVIDIA GeForce RTX 3090", total_mib=24576)
    found = detect()
    assert found.smallest is not None and found.smallest.catalog_name == "GeForce RTX 3070"
    assert found.gpus[0].catalog_name == "GeForce RTX 3090"  # CUDA counts the fastest first
    assert any("smallest memory rules" in note for note in found.notes)


def test_a_card_outside_the_catalog_is_estimated(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA GeForce RTX 3075", max_sm_mhz=1725)
    (gpu,) = detect().gpus
    known = catalog.find("3070")
    assert gpu.catalog_name is None and gpu.sms == known.sms
    assert gpu.peak_flops == pytest.approx(known.peak_flops)
    assert gpu.bandwidth_bytes_per_s == pytest.approx(known.bandwidth_bytes_per_s, rel=0.01)
    assert any("not in the catalog" in note for note in detect().notes)


def test_a_card_of_a_known_family_is_estimated_at_its_lowest_rates(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA GB10", capability=121, cores=6144, max_sm_mhz=2400, total_mib=None)
    (gpu,) = detect().gpus
    assert gpu.sms == 48
    assert gpu.peak_flops["bf16"] == pytest.approx(48 * 512 * 2.4e9)


def test_a_card_of_an_unknown_generation_is_planned_by_memory(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA Later 1", capability=990)
    found = detect()
    assert found.gpus[0].peak_flops == {} and found.gpus[0].memory_bytes == 8192 * MIB
    assert any("memory only" in note for note in found.notes)


def test_a_jetson_shares_the_hosts_memory(driver: NvmlStandin) -> None:
    driver.card(0, name="Orin (nvgpu)", capability=87, total_mib=None, power_mw=None)
    found = detect()
    assert found.gpus[0].memory_bytes == found.host.ram_bytes
    assert found.gpus[0].catalog_name is not None and found.gpus[0].catalog_name.startswith("Jetson")


@pytest.mark.parametrize("calls", range(4))
def test_a_lost_card_is_left_out_and_said(driver: NvmlStandin, calls: int) -> None:
    driver.card(0)
    driver.card(1, lost_after=calls)
    found = detect()
    assert [gpu.uuid for gpu in found.gpus] == [driver.uuid(0)]
    assert any("left out" in note for note in found.notes)


def test_no_driver_is_the_cpu_with_the_reason(driver: NvmlStandin) -> None:
    driver.set(init=DRIVER_NOT_LOADED)
    found = detect()
    assert found.gpus == () and any("Driver Not Loaded" in note for note in found.notes)
    assert found.host.cores > 0 and found.host.ram_bytes > 0


def test_detecting_does_not_import_torch(nvml_standin: NvmlStandin) -> None:
    nvml_standin.card(0)
    code = (
        "import sys, json; from hfopt.hardware.detect import detect; gpus = detect().gpus\n"
        "print(json.dumps([len(gpus), [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]]))"
    )
    environment = {**os.environ, **nvml_standin.environment}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == [1, []]


def test_amd_cards_are_named_and_planned_by_memory(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.set(init=DRIVER_NOT_LOADED)
    card = Gpu(name="AMD Radeon RX 7900 XTX", vendor="amd", memory_bytes=24 * GIB)
    monkeypatch.setattr("hfopt.hardware.detect.amd_gpus", lambda: (card,))
    found = detect()
    assert found.gpus == (card,) and any("memory only" in note for note in found.notes)


def test_amd_cards_are_found_beside_an_nvidia_driver_without_cards(driver: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(Gpu(name="Instinct", vendor="amd", memory_bytes=64 * GIB, index=index, uuid=f"GPU-{index}f") for index in range(3))
    monkeypatch.setattr("hfopt.hardware.detect.amd_gpus", lambda: cards)
    assert detect().gpus == cards
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "2,0")
    assert [gpu.index for gpu in detect().gpus] == [2, 0]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert detect().gpus == ()


def test_a_named_card_is_hypothetical_and_may_come_in_numbers() -> None:
    found = named("rtx 3070", count=4)
    assert found.hypothetical and [gpu.name for gpu in found.gpus] == ["GeForce RTX 3070"] * 4
    assert found.driver_version is None


def test_a_named_memory_tells_variants_apart_or_overrides() -> None:
    assert named("a100", memory_bytes=80 * GIB).gpus[0].memory_bytes == 80 * GIB
    halved = named("a100 pcie 40gb", memory_bytes=20 * GIB)
    assert halved.gpus[0].memory_bytes == 20 * GIB and halved.gpus[0].catalog_name == "A100 PCIe 40GB"
    assert any("as asked" in note for note in halved.notes)


def test_a_nominal_size_does_not_give_a_card_more_than_it_has() -> None:
    card = catalog.find("4090")
    assert named("4090", memory_bytes=24 * GIB).gpus == (card,)  # 24564 MiB are sold as 24 GB
    assert named("t4", memory_bytes=16 * GIB).gpus == (catalog.find("t4"),)
    assert named("4090", memory_bytes=23 * GIB).gpus[0].memory_bytes == 23 * GIB
    assert named("4090", memory_bytes=48 * GIB).gpus[0].memory_bytes == 48 * GIB


def test_an_unknown_card_needs_its_memory() -> None:
    with pytest.raises(HardwareError) as caught:
        named("RTX 9070")
    assert "nearest" in (caught.value.hint or "")
    found = named("Moore 9000", memory_bytes=16 * GIB)
    assert found.gpus[0].peak_flops == {} and any("memory only" in note for note in found.notes)


def test_the_cpu_can_be_named() -> None:
    assert named("CPU").gpus == ()


def test_no_cards_cannot_train() -> None:
    with pytest.raises(HardwareError):
        named("3070", count=0)


@pytest.mark.gpu
def test_a_real_card_is_found() -> None:
    found = detect()
    assert Path("/proc/driver/nvidia/version").exists() and found.gpus and found.gpus[0].memory_bytes > GIB
