"""Real shortages, not injected ones: PyTorch's CUDA allocator on a small card, and the CPU's under a limit of the address space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "real_shortage.py"
ROOT = Path(__file__).parents[2]


def run(device: str, folder: Path, env: dict[str, str]) -> dict[str, Any]:
    env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(ROOT)))), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), device, str(folder)], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_on_a_card_that_is_too_small_no_step_is_lost_and_memory_is_freed(tmp_path: Path) -> None:
    from hfopt.hardware.detect import named
    from hfopt.units import MIB
    from hfopt.virtual.environment import environment

    card = named("RTX 3060", memory_bytes=400 * MIB).gpus[0]
    result = run("cuda", tmp_path, environment(card))
    assert result["step"] == 4
    assert result["seen"], "the card was large enough: the test shows nothing"
    assert result["actions"][0] in ("chunk", "retry_after_clearing")
    assert all(32 % size == 0 for size in result["sizes"])
    for seen in result["seen"]:
        assert seen["reserved_bytes"] + seen["requested_bytes"] > seen["capacity_bytes"]
        assert seen["baseline_bytes"] <= result["begin"][seen["step"]], "the failed step still holds memory"
    # the first step makes Adam's state and the last window's batches come and go: after that the level stands still
    assert result["end"][1] == result["end"][2] == result["end"][3]


@pytest.mark.slow
def test_under_a_limit_of_the_address_space_the_weights_are_the_same(tmp_path: Path) -> None:
    result = run("cpu", tmp_path, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert result["step"] == 4
    assert result["seen"], "there was room enough: the test shows nothing"
    assert result["difference"] < 1e-6
