"""Each thing that would slow training is found where it is, and not where it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hfopt.compat.versions import TorchBuild
from hfopt.hardware import catalog
from hfopt.hardware.checkup import Software, Surroundings, findings
from hfopt.schema import Hardware, Host
from hfopt.units import GIB

HOST = Host(cores=8, ram_bytes=64 * GIB, ram_free_bytes=50 * GIB)
CARD = replace(catalog.find("3070"), uuid="GPU-1")
MACHINE = Hardware(gpus=(CARD,), host=HOST, driver_version="580.95.05", cuda_version="13.0")
TORCH = TorchBuild(version="2.9.0+cu128", cuda="12.8")
SOFTWARE = Software(torch=TORCH, transformers="5.0", accelerate="1.3", nvidia_ml_py="13.0", deprecated_pynvml=None, optional={})
AROUND = Surroundings(environment={}, shared_memory_bytes=8 * GIB)


def found(hardware: Hardware = MACHINE, software: Software = SOFTWARE, around: Surroundings = AROUND) -> dict[str, str]:
    return {problem.code: problem.severity for problem in findings(hardware, software, around)}


def test_a_sound_machine_has_no_findings() -> None:
    assert found() == {}


def with_card(name: str, **changes: Any) -> Hardware:
    return replace(MACHINE, gpus=(replace(catalog.find(name), uuid="GPU-1", **changes),))


@pytest.mark.parametrize(
    ("hardware", "software", "around", "code", "severity"),
    [
        (MACHINE, replace(SOFTWARE, torch=TorchBuild(version="2.9.0+cpu")), AROUND, "cpu_only_torch", "error"),
        (MACHINE, replace(SOFTWARE, torch=None), AROUND, "no_torch", "error"),
        (MACHINE, replace(SOFTWARE, deprecated_pynvml="11.5.0"), AROUND, "deprecated_pynvml", "warning"),
        (MACHINE, replace(SOFTWARE, nvidia_ml_py=None), AROUND, "no_nvidia_ml_py", "warning"),
        (replace(MACHINE, driver_version="470.82", cuda_version="11.4"), SOFTWARE, AROUND, "driver_too_old", "error"),
        (replace(MACHINE, driver_version="535.54", cuda_version="12.2"), SOFTWARE, AROUND, "driver_older", "note"),
        (replace(MACHINE, host=replace(HOST, cores=1)), SOFTWARE, AROUND, "few_cores", "warning"),
        (replace(MACHINE, gpus=(CARD,) * 8), SOFTWARE, AROUND, "few_cores", "warning"),
        (replace(MACHINE, host=replace(HOST, ram_bytes=2 * GIB)), SOFTWARE, AROUND, "little_ram", "note"),
        (MACHINE, SOFTWARE, replace(AROUND, shared_memory_bytes=64 << 20), "small_shared_memory", "warning"),
        (MACHINE, SOFTWARE, replace(AROUND, environment={"CUDA_LAUNCH_BLOCKING": "1"}), "slow_setting", "warning"),
        (MACHINE, SOFTWARE, replace(AROUND, nvidia_on_bus=True, nvml_problem="Driver Not Loaded"), "driver_unreachable", "error"),
        (MACHINE, SOFTWARE, replace(AROUND, throttle={"GPU-1": ("hw_thermal_slowdown",)}), "throttled", "warning"),
        (MACHINE, SOFTWARE, replace(AROUND, lanes={"GPU-1": (4, 16)}), "pcie_lanes", "warning"),
        (with_card("3070", free_bytes=4 * GIB), SOFTWARE, AROUND, "shared_card", "warning"),
        (with_card("4090", power_limit_w=300.0), SOFTWARE, AROUND, "power_limit", "note"),
        (with_card("t4"), SOFTWARE, AROUND, "no_bf16", "note"),
        (with_card("1080 ti"), SOFTWARE, AROUND, "card_too_old", "error"),
        (with_card("5090"), replace(SOFTWARE, torch=TorchBuild(version="2.6.0", cuda="12.4")), AROUND, "build_too_old", "error"),
        (replace(MACHINE, notes=("odd",)), SOFTWARE, AROUND, "note", "note"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_found(hardware: Hardware, software: Software, around: Surroundings, code: str, severity: str) -> None:
    assert found(hardware, software, around).get(code) == severity


@pytest.mark.parametrize(
    ("hardware", "software", "around", "code"),
    [
        (replace(MACHINE, gpus=()), replace(SOFTWARE, torch=TorchBuild(version="2.9.0+cpu")), AROUND, "cpu_only_torch"),
        (replace(MACHINE, gpus=(), host=replace(HOST, cores=1)), SOFTWARE, AROUND, "few_cores"),
        (MACHINE, SOFTWARE, replace(AROUND, nvml_problem="no library"), "driver_unreachable"),  # no card on the bus
        (MACHINE, SOFTWARE, replace(AROUND, environment={"CUDA_LAUNCH_BLOCKING": "0"}), "slow_setting"),
        (with_card("1080 ti"), replace(SOFTWARE, torch=TorchBuild(version="2.9.0+cu126", cuda="12.6")), AROUND, "card_too_old"),
        (with_card("t4"), SOFTWARE, AROUND, "card_too_old"),
        (with_card("h100 pcie"), replace(SOFTWARE, torch=TorchBuild(version="2.6.0", cuda="12.4")), AROUND, "build_too_old"),
    ],
)
def test_what_is_right_is_left_alone(hardware: Hardware, software: Software, around: Surroundings, code: str) -> None:
    assert code not in found(hardware, software, around)


def test_the_worst_comes_first_and_a_thing_is_said_once() -> None:
    machine = replace(MACHINE, gpus=(replace(catalog.find("t4"), uuid="GPU-1"),) * 4, host=replace(HOST, cores=1))
    severities = [problem.severity for problem in findings(machine, replace(SOFTWARE, torch=None), AROUND)]
    assert severities == sorted(severities, key=("error", "warning", "note").index)
    assert len([problem for problem in findings(machine, SOFTWARE, AROUND) if problem.code == "no_bf16"]) == 1
    assert all(problem.fix for problem in findings(machine, SOFTWARE, AROUND) if problem.severity != "note")
