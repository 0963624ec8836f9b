"""A driver to test against: compiles nvml_standin.c once, writes the file it answers from, and hands it to pynvml.

`card(0, name=..., util=40)` describes a card, `change(0, util=90)` changes it while it is in use (util="10 50 90": the next at each call),
`use(monkeypatch)` makes this process's pynvml talk to it, `environment` a child's. What a card is not given, it does not support.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("nvml_standin.c")
USUAL = {  # an idle RTX 3070, as nvidia-smi shows one
    "name": "NVIDIA GeForce RTX 3070",
    "capability": 86,
    "total_mib": 8192,
    "reserved_mib": 225,
    "used_mib": 0,
    "cores": 5888,
    "bus_bits": 256,
    "util": 0,
    "memory_util": 0,
    "power_mw": 20_000,
    "power_limit_mw": 220_000,
    "energy_mj": 1_000,
    "temperature": 45,
    "sm_mhz": 1_725,
    "max_sm_mhz": 2_100,
    "max_memory_mhz": 7_001,
    "throttle": 0,
    "pcie_generation": 4,
    "pcie_lanes": 16,
    "pcie_max_lanes": 16,
    "pcie_rx_kb": 0,
    "pcie_tx_kb": 0,
    "processes": "",
    "mig": 0,
}


def compile_standin(folder: Path, *, old_driver: bool = False) -> Path:
    library = folder / "libnvidia-ml.so.1"
    flags = ["-shared", "-fPIC", "-O1", "-fvisibility=hidden", *(["-DOLD_DRIVER"] if old_driver else [])]
    subprocess.run(["cc", *flags, "-o", library, SOURCE], check=True, capture_output=True, text=True)
    return library


class NvmlStandin:
    """The file and the library behind one pretended driver."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library, self.file = library, folder / "nvml.txt"
        self.settings: dict[str, Any] = {"driver": "570.86.15", "cuda": 12080, "count": 0}
        self._write()

    def card(self, index: int, **values: Any) -> None:
        """A card like USUAL but for these values; None takes a value away ('not supported')."""
        self.settings["count"] = max(self.settings["count"], index + 1)
        self.change(index, **{"uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444", **USUAL, **values})

    def instance(self, index: int, number: int, **values: Any) -> None:
        """A MIG instance of a card."""
        uuid = f"MIG-{index:04x}{number:04x}-1111-2222-3333-444444444444"
        self.change(f"{index}/{number}", **{"uuid": uuid, "processes": "", **values})

    def change(self, device: int | str, **values: Any) -> None:
        self.set(**{f"{device}.{key}": value for key, value in values.items()})

    def set(self, **values: Any) -> None:
        """Driver-wide: init (the error code of nvmlInit), driver, cuda, count."""
        self.settings.update(values)
        self._write()

    def uuid(self, index: int) -> str:
        return str(self.settings[f"{index}.uuid"])

    @property
    def environment(self) -> dict[str, str]:
        """For a child process: its pynvml finds the stand-in as the system's library."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "HFOPT_NVML_STANDIN": str(self.file)}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In this process: pynvml is given the library, and forgets it when the test ends."""
        import pynvml

        monkeypatch.setenv("HFOPT_NVML_STANDIN", str(self.file))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(self.library)))
        self.restart()
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def restart(self) -> None:
        """The driver of this process anew: no session open, every sequence and every count of calls at its start."""
        ctypes.CDLL(str(self.library)).nvml_standin_restart()

    def _write(self) -> None:
        lines = [f"{key} {str(value).strip()}" for key, value in self.settings.items() if value is not None]
        temporary = self.file.with_suffix(".new")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(self.file)
