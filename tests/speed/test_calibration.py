"""What was measured of a device: kept, used for that device under that torch only, and never half believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfopt.hardware import catalog
from hfopt.schema import Gpu, Host
from hfopt.speed import calibration
from hfopt.speed.calibration import Calibration, calibrated, clear, for_device, from_json, keep, stored, unfit
from hfopt.speed.device_speed import speed_of
from hfopt.speed.kernel_rates import kernel_rates

CARD = catalog.find("rtx 3070")
HOST = Host(cores=8, ram_bytes=1 << 34, ram_free_bytes=1 << 33, cpu_name="Some CPU")
MADE = Calibration(
    device=CARD.name,
    kind="cuda",
    torch="2.15.0",
    transformers="5.22.2",
    cpu_name="Some CPU",
    cores=8,
    threads=None,
    date="2026-11-17",
    matmul_flops={"fp32": 1e13, "bf16": 3e13},
    memory_bytes_per_s=3e11,
    reduction_bytes_per_s=2e11,
    op_s=5e-6,
    launch_scale=0.5,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "package_version", lambda name: "2.15.0")
    return tmp_path


def test_it_is_kept_once_per_device_and_cleared(cache: Path) -> None:
    assert stored() == () and clear() == 0
    path = keep(MADE)
    keep(replace(MADE, date="2026-11-18"))
    keep(replace(MADE, device="L4"))
    assert path.is_relative_to(cache) and path.stat().st_mode & 0o077 == 0
    assert {(one.device, one.date) for one in stored()} == {(CARD.name, "2026-11-18"), ("L4", "2026-11-17")}
    assert from_json(MADE.to_json()) == MADE
    assert clear() == 2 and stored() == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 1}',
        json.dumps({**json.loads(MADE.to_json()), "format": 2}),
        json.dumps({**json.loads(MADE.to_json()), "op_s": 0}),
        json.dumps({**json.loads(MADE.to_json()), "matmul_flops": {"bf16": 1.0}}),
        json.dumps({**json.loads(MADE.to_json()), "matmul_flops": "fp32"}),
        json.dumps({**json.loads(MADE.to_json()), "launch_scale": -1.0}),
        json.dumps({**json.loads(MADE.to_json()), "more": 1}),
    ],
)
def test_what_is_no_whole_calibration_is_not_believed(text: str) -> None:
    assert from_json(text) is None
    calibration.folder().mkdir(parents=True)
    (calibration.folder() / "cuda-x.json").write_text(text)
    assert stored() == ()


def test_it_is_used_for_its_own_device_and_torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    keep(MADE)
    assert for_device(CARD, HOST) == (MADE, None)
    assert for_device(catalog.find("rtx 3090"), HOST) == (None, None) and for_device(None, HOST) == (None, None)
    monkeypatch.setattr(calibration, "package_version", lambda name: "2.16.0")
    used, remark = for_device(CARD, HOST)
    assert used is None and remark is not None and "made with torch 2.15.0, 2.16.0 is installed" in remark


def test_that_of_a_cpu_is_for_the_same_number_of_threads() -> None:
    cpu = replace(MADE, device="Some CPU", kind="cpu", threads=4)
    keep(cpu)
    assert for_device(None, HOST, threads=4) == (cpu, None) and for_device(Gpu(name="Some CPU", memory_bytes=1), HOST) == (None, None)
    assert for_device(None, HOST, threads=2)[1] is not None and "4 threads" in str(unfit(cpu, threads=2))
    assert for_device(None, replace(HOST, cpu_name="Other"), threads=4) == (None, None)


def test_a_calibrated_card_has_its_own_figures_and_no_power_rule_on_top() -> None:
    table = speed_of(CARD)
    assert table is not None and table.board is not None
    own = calibrated(table, MADE)
    assert own.matmul_flops["bf16"] == 3e13 and own.matmul_flops["fp16"] == table.matmul_flops["fp16"], "what was not measured stays"
    assert (own.memory_bytes_per_s, own.reduction_bytes_per_s, own.board) == (3e11, 2e11, None)
    assert own.host.forward_s == pytest.approx(table.host.forward_s / 2) and own.flash_share == table.flash_share
    slower = calibrated(table, replace(MADE, launch_scale=None, step_scale=2.0))
    assert slower.matmul_flops["fp32"] == 5e12 and slower.memory_bytes_per_s == 1.5e11
    assert slower.host.step_s == pytest.approx(2 * table.host.step_s)


def test_the_kernels_of_this_cpu_are_measured() -> None:
    rates = kernel_rates(torch.device("cpu"))
    assert rates.matmul_flops.keys() == {"fp32", "bf16", "fp16"} and all(rate > 1e6 for rate in rates.matmul_flops.values())
    assert 1e6 < rates.reduction_bytes_per_s < 1e13 and 1e6 < rates.memory_bytes_per_s < 1e13 and 0 < rates.op_s < 1
