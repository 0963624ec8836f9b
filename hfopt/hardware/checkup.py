"""A look at this machine for `hfopt doctor`: detection, installed software, what the driver says now, and what follows from it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hfopt.hardware import nvml
from hfopt.hardware.detect import detect
from hfopt.hardware.health import Surroundings, findings
from hfopt.hardware.probe import Probe, probe
from hfopt.hardware.probe import problems as disagreements
from hfopt.hardware.software import Software, installed
from hfopt.schema import Gpu, Hardware, Problem

_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    hardware: Hardware
    software: Software
    nvml_problem: str | None  # None: the driver answers
    problems: tuple[Problem, ...]
    probe: Probe | None = None  # None: torch was not asked


def checkup(*, ask_torch: bool = False) -> Checkup:
    hardware, software = detect(), installed()
    around = _surroundings(hardware.gpus)
    problems = findings(hardware, software, around)
    answer = probe() if ask_torch else None
    if answer is not None:
        known = {problem.code for problem in problems}
        told = known & {"card_too_old", "build_too_old"}  # with the build that would do
        problems = (*(problem for problem in disagreements(hardware, answer) if problem.code != "no_kernels" or not told), *problems)
    return Checkup(hardware=hardware, software=software, nvml_problem=around.nvml_problem, problems=problems, probe=answer)


def flash_attention(gpu: Gpu) -> bool | None:
    """Whether PyTorch's own scaled_dot_product_attention has a flash kernel for the card (sdp_utils.cpp: sm_80 and up)."""
    return None if gpu.capability is None else gpu.capability >= (8, 0)


def _surroundings(gpus: tuple[Gpu, ...]) -> Surroundings:
    shown = {gpu.uuid for gpu in gpus}
    throttle: dict[str, tuple[str, ...]] = {}
    lanes: dict[str, tuple[int, int]] = {}
    session = nvml.connect()
    if isinstance(session, nvml.Session):
        for device in session.devices():
            reading = device.reading() if device.uuid in shown else None
            if reading is not None:
                throttle[device.uuid] = reading.throttle
            if device.pcie and device.max_pcie_lanes:
                lanes[device.uuid] = (device.pcie[1], device.max_pcie_lanes)
        session.close()
    return Surroundings(
        environment=os.environ,
        shared_memory_bytes=_shared_memory_bytes(),
        nvidia_on_bus=nvidia_on_bus(),
        nvml_problem=session.reason if isinstance(session, nvml.Unreachable) else None,
        throttle=throttle,
        lanes=lanes,
    )


def nvidia_on_bus(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA display device is plugged in, driver or not."""
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _NVIDIA_VENDOR and vendor.with_name("class").read_text().startswith(_DISPLAY_CLASS):
                return True
        except OSError:
            continue
    return False


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None
