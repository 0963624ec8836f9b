"""The figures a device is planned with: the table's, those measured on it, and those of a host that is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hfopt.errors import ConfigError
from hfopt.hardware import catalog
from hfopt.planner import calibrate_device as calibrate
from hfopt.planner.calibrate_device import MeasuredStep, with_step
from hfopt.pricing.target_device import device_figures
from hfopt.schema import Hardware, Host, OpCost
from hfopt.speed import calibration
from hfopt.speed.calibration import Calibration, NamedHost, calibrated, keep, named_host, with_host
from hfopt.speed.device_speed import speed_of
from hfopt.speed.step_time import StepTimer

CARD = catalog.find("rtx 3070")
TABLE = speed_of(CARD)
HOST = Host(cores=2, ram_bytes=1 << 34, ram_free_bytes=1 << 33, cpu_name="Some CPU")
MADE = Calibration(
    device=CARD.name, kind="cuda", torch="9.9", transformers=None, cpu_name="Some CPU", cores=24, threads=None, date="2026-11-17",
    matmul_flops={"fp32": 1e13}, memory_bytes_per_s=3e11, reduction_bytes_per_s=2e11, op_s=5e-6, launch_scale=0.5,
)  # fmt: skip
OPS = (
    OpCost(
        name="aten::add", kind="elementwise", dtype="float32", phase="forward", count=1000,
        flops_constant=0, flops_slope=0, bytes_constant=1e3, bytes_slope=0,
    ),
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "package_version", lambda name: "9.9")


def test_without_a_calibration_the_table_counts_and_the_host_is_said() -> None:
    assert TABLE is not None
    figures = device_figures(CARD, HOST, TABLE, NamedHost())
    assert figures.speed is TABLE and figures.notes == () and figures.launches == "a server's CPU (20 µs each in forward)"
    assert device_figures(None, HOST, TABLE, NamedHost()).launches == "", "a CPU launches nothing"


def test_a_calibration_is_used_and_said() -> None:
    assert TABLE is not None
    keep(MADE)
    figures = device_figures(CARD, HOST, TABLE, NamedHost())
    assert figures.speed == calibrated(TABLE, MADE) and figures.launches == "this host as calibrated (10 µs each in forward)"
    assert figures.notes == (f"speeds of {CARD.name} as `hfopt calibrate` measured it on 2026-11-17 with torch 9.9",)
    named = device_figures(CARD, HOST, TABLE, named_host("40us"))
    assert named.speed.matmul_flops["fp32"] == 1e13 and named.speed.host.backward_s == pytest.approx(2 * TABLE.host.backward_s)
    assert named.launches == "the host as named (40 µs each in forward)"


def test_a_host_is_named_by_cores_launch_or_file(tmp_path: Path) -> None:
    assert named_host(None) == named_host("") == NamedHost()
    assert named_host("16cores,30us") == NamedHost(cores=16, launch_s=pytest.approx(30e-6))  # type: ignore[arg-type]
    assert named_host(" 1 core ") == NamedHost(cores=1) and named_host("12.5 µs").launch_s == pytest.approx(12.5e-6)
    file = tmp_path / "there.json"
    file.write_text(MADE.to_json())
    found = named_host(str(file))
    assert (found.cores, found.launch_scale, found.source) == (24, 0.5, str(file)) and TABLE is not None
    assert device_figures(CARD, HOST, TABLE, found).launches == f"the host of {file} (10 µs each in forward)"
    without = device_figures(CARD, HOST, TABLE, replace(found, launch_scale=None))
    assert "a server's CPU" in without.launches and any("holds no cost of a launch" in note for note in without.notes)
    hardware = with_host(Hardware(gpus=(CARD,), host=HOST), found)
    assert hardware.host.cores == 24 and hardware.host.ram_bytes == HOST.ram_bytes
    assert with_host(hardware, NamedHost()) is hardware
    elsewhere = with_host(replace(hardware, hypothetical=True), NamedHost(cores=16.0)).host
    assert elsewhere.ram_free_bytes == elsewhere.ram_bytes == 60 << 30, "not the RAM of this machine"


@pytest.mark.parametrize("text", ["fast", "0us", "0cores", "-3us", "nosuch.json", "16"])
def test_a_bad_host_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--host") as caught:
        named_host(text)
    assert "16cores" in (caught.value.hint or "")


def test_a_file_that_is_no_calibration_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="is no calibration"):
        named_host(str(tmp_path / "x.json"))


def test_the_factor_on_launches_is_the_one_that_meets_the_measured_step() -> None:
    assert TABLE is not None
    blank = replace(MADE, launch_scale=None)
    for factor in (0.3, 1.0, 4.0):
        alone = calibrated(TABLE, blank)
        step_s = StepTimer(OPS, replace(alone, host=alone.host.scaled(factor)), "fp32").at(calibrate.BATCH).step_s
        found = with_step(blank, TABLE, MeasuredStep(step_s=step_s, ops=OPS))
        assert found.launch_scale == pytest.approx(factor, rel=1e-3) and found.trainer_step_s == step_s
    assert with_step(blank, TABLE, MeasuredStep(step_s=1e-9, ops=OPS)).launch_scale is None, "no host is that quick"


def test_the_step_of_a_cpu_is_scaled_whole() -> None:
    assert TABLE is not None
    table = replace(TABLE, asynchronous=False, kernel_floor_s=0.0)
    blank = replace(MADE, launch_scale=None)
    found = with_step(blank, table, MeasuredStep(step_s=1.0, ops=OPS))
    assert found.launch_scale is None and found.step_scale is not None and found.predicted_step_s is not None
    assert found.step_scale == pytest.approx(1.0 / found.predicted_step_s)
    assert StepTimer(OPS, calibrated(table, found), "fp32").at(calibrate.BATCH).step_s == pytest.approx(1.0, rel=0.05)
