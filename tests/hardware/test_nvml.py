"""The real pynvml binding against a pretended driver: what the driver does not say is None, and nothing it does becomes an exception."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_standin import NvmlStandin, compile_standin

from hfopt.hardware import nvml
from hfopt.units import MIB

DRIVER_NOT_LOADED, VERSION_MISMATCH, NO_PERMISSION = 9, 18, 4


@pytest.fixture
def driver(nvml_standin: NvmlStandin, monkeypatch: pytest.MonkeyPatch) -> NvmlStandin:
    nvml_standin.use(monkeypatch)
    return nvml_standin


def connected() -> nvml.NvmlSession:
    session = nvml.connect()
    assert isinstance(session, nvml.NvmlSession)
    return session


def test_a_busy_card_is_read_whole(driver: NvmlStandin) -> None:
    driver.card(0, util=87, memory_util=40, used_mib=5000, power_mw=215_500, energy_mj=9_000, temperature=81, sm_mhz=1695)
    driver.change(0, throttle=0x04 | 0x40 | 0x01, pcie_rx_kb=2000, pcie_tx_kb=100, processes=f"{os.getpid()}:3000 1:2000")
    (device,) = connected().devices()
    reading = device.reading([os.getpid()], pcie=True)
    assert reading is not None
    assert reading.uuid == driver.uuid(0)
    assert reading.sm_util == pytest.approx(0.87) and reading.memory_util == pytest.approx(0.40)
    assert reading.used_bytes == 5000 * MIB and reading.total_bytes == 8192 * MIB
    assert reading.own_used_bytes == 3000 * MIB
    assert reading.power_w == pytest.approx(215.5) and reading.power_limit_w == pytest.approx(220)
    assert reading.energy_j == pytest.approx(9.0)
    assert (reading.temperature_c, reading.sm_clock_mhz, reading.max_sm_clock_mhz) == (81, 1695, 2100)
    assert reading.throttle == ("sw_power_cap", "hw_thermal_slowdown")
    assert reading.pcie_rx_bytes_per_s == 2_000_000 and reading.pcie_tx_bytes_per_s == 100_000


def test_what_the_card_does_not_support_is_none(driver: NvmlStandin) -> None:
    driver.card(0, power_mw=None, power_limit_mw=None, energy_mj=None, util=None, temperature=None, throttle=None, processes=None)
    (device,) = connected().devices()
    reading = device.reading([os.getpid()])
    assert reading is not None
    assert (reading.power_w, reading.power_limit_w, reading.energy_j, reading.sm_util, reading.temperature_c) == (None,) * 5
    assert reading.throttle == () and reading.own_used_bytes is None
    assert reading.total_bytes == 8192 * MIB


def test_a_reading_follows_the_card(driver: NvmlStandin) -> None:
    driver.card(0, util="10 50 90")
    (device,) = connected().devices()
    readings = [device.reading() for _ in range(4)]
    assert [round(100 * (reading.sm_util or 0)) for reading in readings if reading] == [10, 50, 90, 90]
    driver.change(0, util=20)
    after = device.reading()
    assert after is not None and after.sm_util == pytest.approx(0.2)


def test_a_card_that_falls_off_the_bus_is_none_and_the_others_go_on(driver: NvmlStandin) -> None:
    driver.card(0)
    driver.card(1)
    first, second = connected().devices()
    assert first.reading() is not None
    driver.change(0, lost=1)
    assert first.reading() is None
    assert first.memory() is None and first.power_limit_w is None
    assert second.reading() is not None


def test_every_moment_of_falling_off_the_bus_is_survived(driver: NvmlStandin) -> None:
    outcomes = set()
    driver.card(0)
    for calls in range(30):
        driver.restart()
        driver.change(0, lost_after=calls)
        for device in connected().devices():
            reading = device.reading([os.getpid()], pcie=True)
            outcomes.add("gone" if reading is None else "partial" if reading.pcie_rx_bytes_per_s is None else "whole")
    assert outcomes == {"gone", "partial", "whole"}


def test_own_memory_is_unknown_where_the_driver_counts_in_another_pid_namespace(driver: NvmlStandin) -> None:
    elsewhere = 2**22 + 5  # above the kernel's largest pid
    driver.card(0, processes=f"{elsewhere}:3000")
    (device,) = connected().devices()
    assert device.used_by([os.getpid()]) is None
    driver.change(0, processes="1:3000")
    assert device.used_by([os.getpid()]) == 0
    driver.change(0, processes=f"{os.getpid()}")  # listed, but not how much (WSL)
    assert device.used_by([os.getpid()]) is None


@pytest.mark.parametrize(("code", "kind"), [(DRIVER_NOT_LOADED, "no_driver"), (VERSION_MISMATCH, "mismatch"), (NO_PERMISSION, "other")])
def test_a_driver_that_refuses_is_a_reason(driver: NvmlStandin, code: int, kind: str) -> None:
    driver.set(init=code)
    answer = nvml.connect()
    assert isinstance(answer, nvml.Unreachable)
    assert answer.kind == kind and answer.reason


def test_an_old_driver_without_the_newer_functions(nvml_standin: NvmlStandin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = NvmlStandin(compile_standin(tmp_path, old_driver=True), tmp_path)
    old.use(monkeypatch)
    old.card(0, throttle=0x20, used_mib=1000, processes=f"{os.getpid()}:700")
    (device,) = connected().devices()
    memory, reading = device.memory(), device.reading([os.getpid()])
    assert memory is not None and memory.reserved_bytes is None and memory.used_bytes == 1225 * MIB  # the reserve counts as used
    assert reading is not None and reading.throttle == ("sw_thermal_slowdown",) and reading.own_used_bytes == 700 * MIB
    assert device.cores is None and device.bandwidth_bytes_per_s is None


def test_closing_leaves_devices_that_answer_none(driver: NvmlStandin) -> None:
    driver.card(0)
    session = connected()
    (device,) = session.devices()
    session.close()
    assert device.reading() is None
    session.close()  # twice is harmless


def test_mig_instances_have_their_own_memory_and_the_cards_heat(driver: NvmlStandin) -> None:
    driver.card(0, name="NVIDIA A100-SXM4-40GB", capability=80, total_mib=40960, mig=1, temperature=50)
    driver.instance(0, 0, name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", sms=14, total_mib=4864, used_mib=100)
    driver.instance(0, 1, name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", sms=42, total_mib=19968)
    (card,) = connected().devices()
    small, large = card.instances()
    assert (small.instance_sms, large.instance_sms) == (14, 42)
    reading = small.reading()
    assert reading is not None
    assert reading.total_bytes == 4864 * MIB and reading.used_bytes == 100 * MIB
    assert reading.temperature_c == 50 and reading.sm_util is None and reading.power_w is None


def test_a_child_process_finds_the_driver_by_its_library_name(nvml_standin: NvmlStandin) -> None:
    nvml_standin.card(0)
    code = (
        "import sys, json; from hfopt.hardware import nvml; assert 'pynvml' not in sys.modules\n"
        "session = nvml.connect(); print(json.dumps([session.driver_version, session.cuda_version, [d.name for d in session.devices()]]))"
    )
    environment = {**os.environ, **nvml_standin.environment}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == ["570.86.15", "12.8", ["NVIDIA GeForce RTX 3070"]]


def test_without_the_binding_the_reason_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answer = nvml.connect()
    assert isinstance(answer, nvml.Unreachable)
    assert answer.kind == "no_binding" and "nvidia-ml-py" in answer.reason


def test_the_lanes_of_card_and_slot_are_told_apart(driver: NvmlStandin) -> None:
    driver.card(0, pcie_lanes=4)
    driver.card(1, pcie_max_lanes=None)
    narrow, unknown = connected().devices()
    assert narrow.pcie == (4, 4) and narrow.max_pcie_lanes == 16
    assert unknown.pcie == (4, 16) and unknown.max_pcie_lanes is None
