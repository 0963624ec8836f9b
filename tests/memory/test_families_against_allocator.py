"""Families of models against PyTorch's own allocator: the Trainer on the virtual GPU, at batch sizes and windows that were not traced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hfopt.schema import Gpu
from hfopt.units import GIB

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMPARE = """
import json, sys
from cases import Case, estimated_curve
case = Case(**json.loads(sys.argv[1]))
peak = estimated_curve(case).peak(case.batch)
print("PEAK", json.dumps([peak.allocated_bytes, peak.reserved_bytes]))
"""
CASES = [
    {"model": "tiny:qwen2_5_vl", "batch": 4, "data": {"image_size": 224, "images_per_sample": 2}, "precision": "bf16"},
    {"model": "tiny:llava_next", "batch": 4, "data": {"image_size": 600}, "frozen_parts": ["vision"]},
    {"model": "tiny:smolvlm", "batch": 2, "accumulation": 12, "optim": "sgd", "data": {"image_size": 1024}},
    {"model": "tiny:mllama", "batch": 5, "checkpointing": True},
    {"model": "tiny:rt_detr", "batch": 4, "data": {"image_size": 320}},
    {"model": "tiny:patchtst", "batch": 13},
    {"model": "tiny:falcon", "batch": 5, "length": 256},
    {"model": "tiny:bamba", "batch": 5, "length": 100},
]


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["model"].removeprefix("tiny:"))
def test_a_family(case: dict[str, object]) -> None:
    from hfopt.virtual.environment import environment

    if case["model"] == "tiny:rt_detr":
        pytest.importorskip("scipy", reason="its loss matches boxes with scipy")
    env = environment(Gpu(name="Virtual", memory_bytes=64 * GIB, capability=(8, 6), sms=28))
    env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{BENCHMARKS}:{BENCHMARKS.parent}"
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "virtual_worker.py")],
        input=json.dumps(case),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    real = json.loads(run.stdout or "{}")
    assert "allocated" in real, f"{real} {run.stderr[-2000:]}"
    here = {"PYTHONPATH": f"{BENCHMARKS}:{BENCHMARKS.parent}", "PATH": env.get("PATH", ""), "HF_HUB_OFFLINE": "1"}
    made = subprocess.run([sys.executable, "-c", COMPARE, json.dumps(case)], env=here, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    allocated, reserved = json.loads(made.stdout.rpartition("PEAK")[2])
    assert allocated == pytest.approx(real["allocated"], rel=0.01)
    assert reserved == pytest.approx(real["reserved"], rel=0.03)
