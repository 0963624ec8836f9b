"""The torch build is read, not imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from hfopt.compat import versions
from hfopt.compat.versions import TorchBuild, package_version, parse_build, torch_build
from hfopt.hardware import checkup
from hfopt.hardware.checkup import installed, nvidia_on_bus

ANNOTATED = (
    "from typing import Optional\n__version__ = '2.9.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
)


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (ANNOTATED, TorchBuild(version="2.9.0+cu128", cuda="12.8")),
        ("__version__ = '2.6.0'\ncuda = '12.4'\n", TorchBuild(version="2.6.0", cuda="12.4")),
        ("__version__ = '2.9.0+rocm6.4'\ncuda = None\nhip = '6.4.1'\n", TorchBuild(version="2.9.0+rocm6.4", hip="6.4.1")),
        ("__version__ = '2.9.0+cpu'\ncuda: str | None = None\n", TorchBuild(version="2.9.0+cpu")),
        ("", None),
    ],
)
def test_builds(text: str, build: TorchBuild | None) -> None:
    assert parse_build(text) == build


def test_it_agrees_with_the_torch_that_is_installed() -> None:
    import torch

    build = installed().torch
    assert build is not None
    assert (build.version, build.cuda) == (str(torch.__version__), torch.version.cuda)
    assert build.cpu_only == (torch.version.cuda is None and torch.version.hip is None)


def test_looking_does_not_import() -> None:
    code = "import sys; from hfopt.hardware.checkup import installed; assert installed().torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_packages() -> None:
    assert package_version("no-such-package") is None
    assert installed().nvidia_ml_py == package_version("nvidia-ml-py")
    assert installed().nvidia_ml_py is not None


@pytest.mark.parametrize(
    ("vendor", "kind", "there"), [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x8086", "0x030000", False)]
)
def test_a_card_on_the_bus(tmp_path: Path, vendor: str, kind: str, there: bool) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    (device / "class").write_text(kind + "\n")
    assert nvidia_on_bus(tmp_path) is there


def test_no_torch_and_a_torch_without_its_version_are_no_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    assert torch_build() is None
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(versions, "find_spec", lambda name: spec_from_file_location(name, tmp_path / name / "__init__.py"))
    assert torch_build() is None
    (tmp_path / "torch" / "version.py").write_text(ANNOTATED)
    assert torch_build() == TorchBuild(version="2.9.0+cu128", cuda="12.8")


def test_a_machine_without_shared_memory_has_none_to_be_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: str) -> None:
        raise FileNotFoundError(place)

    monkeypatch.setattr(checkup.shutil, "disk_usage", fails)
    assert checkup._shared_memory_bytes() is None


def test_a_slot_that_is_gone_while_the_bus_is_read(tmp_path: Path) -> None:
    for slot, files in {"0000:01": {"vendor": "0x10de"}, "0000:02": {"vendor": "0x10de", "class": "0x030000"}}.items():
        (tmp_path / "sys/bus/pci/devices" / slot).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "sys/bus/pci/devices" / slot / name).write_text(text)
    assert nvidia_on_bus(tmp_path)
    (tmp_path / "sys/bus/pci/devices/0000:02/class").unlink()
    assert not nvidia_on_bus(tmp_path)
