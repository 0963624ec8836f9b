"""`hfopt doctor` as it is run, against pretended drivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvml_standin import NvmlStandin


def run(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    command = [sys.executable, "-m", "hfopt", "doctor", *arguments]
    return subprocess.run(command, env={**settings, **(environment or {})}, capture_output=True, text=True, check=False)


def codes(report: dict[str, Any]) -> set[str]:
    return {problem["code"] for problem in report["problems"]}


def test_a_healthy_card_is_shown_with_what_it_can_do(nvml_standin: NvmlStandin) -> None:
    nvml_standin.card(0)
    result = run(environment=nvml_standin.environment)
    assert "NVIDIA GeForce RTX 3070" in result.stdout and nvml_standin.uuid(0) in result.stdout
    assert "bf16 yes, tf32 yes, fp16 yes, flash attention yes" in result.stdout
    assert "driver reached" in result.stdout and "570.86.15" in result.stdout
    assert "Traceback" not in result.stderr


def test_json_names_each_thing_that_slows(nvml_standin: NvmlStandin) -> None:
    nvml_standin.set(driver="470.82.01", cuda=11040)
    nvml_standin.card(0, throttle=0x40, used_mib=4000, pcie_lanes=4)
    result = run("--json", environment={**nvml_standin.environment, "CUDA_LAUNCH_BLOCKING": "1"})
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert {"throttled", "shared_card", "pcie_lanes", "slow_setting"} <= codes(report)
    build = report["software"]["torch"]["cuda"]
    assert ("driver_too_old" in codes(report)) == (build is not None)
    assert ("cpu_only_torch" in codes(report)) == (build is None)


def test_no_card_is_no_fault(nvml_standin: NvmlStandin) -> None:
    report = json.loads(run("--json", environment=nvml_standin.environment).stdout)
    assert report["hardware"]["gpus"] == [] and report["nvml_problem"] is None
    assert {problem["severity"] for problem in report["problems"] if "GPU" in problem["message"]} == {"note"}


@pytest.mark.parametrize("code", [9, 18, 999])
def test_a_driver_that_refuses_is_named(nvml_standin: NvmlStandin, code: int) -> None:
    nvml_standin.set(init=code)
    result = run(environment=nvml_standin.environment)
    assert "no driver reached" in result.stdout and "Traceback" not in result.stderr


def test_a_cpu_only_torch_and_the_deprecated_package_are_found_as_installed(nvml_standin: NvmlStandin, tmp_path: Path) -> None:
    nvml_standin.card(0)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError('doctor does not import torch')")
    (tmp_path / "torch/version.py").write_text("__version__ = '2.9.0+cpu'\ncuda = None\n")
    (tmp_path / "pynvml-11.5.0.dist-info").mkdir()
    (tmp_path / "pynvml-11.5.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\nVersion: 11.5.0\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    report = json.loads(run("--json", environment={**nvml_standin.environment, "PYTHONPATH": path}).stdout)
    assert {"cpu_only_torch", "deprecated_pynvml"} <= codes(report)
    assert report["software"]["torch"]["version"] == "2.9.0+cpu"
