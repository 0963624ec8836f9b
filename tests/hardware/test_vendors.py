"""AMD cards from the kernel's files; Apple's from the system's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.hardware import detect
from hfopt.units import GIB


def card(root: Path, number: int, **files: str) -> None:
    folder = root / f"sys/class/drm/card{number}/device"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def test_amd_cards_by_their_product_name(tmp_path: Path) -> None:
    card(tmp_path, 0, vendor="0x8086")
    card(tmp_path, 1, vendor="0x1002", mem_info_vram_total=str(24 * GIB), mem_info_vram_used=str(GIB), product_name="Radeon RX 7900 XTX")
    card(tmp_path, 2, vendor="0x1002", mem_info_vram_total=str(64 * GIB), device="0x740f", unique_id="abc")
    card(tmp_path, 3, vendor="0x1002", mem_info_vram_total=str(GIB // 2), device="0x164e")  # the graphics part of a processor
    (tmp_path / "sys/class/drm/card1-DP-1").mkdir()  # a connector, not a card
    first, second = detect.amd_gpus(tmp_path)
    assert (first.name, first.vendor, first.memory_bytes, first.free_bytes) == ("Radeon RX 7900 XTX", "amd", 24 * GIB, 23 * GIB)
    assert second.name == "AMD GPU 0x740f" and second.free_bytes is None and second.uuid == "GPU-abc"
    assert first.peak_flops == {} and first.catalog_name is None


def test_no_cards_without_the_kernels_files(tmp_path: Path) -> None:
    assert detect.amd_gpus(tmp_path) == ()


def test_an_apple_gpu_shares_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"hw.memsize": str(32 * GIB), "machdep.cpu.brand_string": "Apple M3 Pro"}
    monkeypatch.setattr(detect.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(detect.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(detect, "_sysctl", answers.get)
    (gpu,) = detect.apple_gpus()
    assert (gpu.name, gpu.vendor, gpu.memory_bytes, gpu.usable_bytes) == ("Apple M3 Pro", "apple", 32 * GIB, 24 * GIB)
    monkeypatch.setattr(detect, "_sysctl", lambda name: None)
    assert detect.apple_gpus() == ()


def test_a_machine_without_sysctl_knows_nothing_of_apple() -> None:
    assert detect._sysctl("hw.no_such_thing") is None
