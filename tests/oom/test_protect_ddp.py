"""Several ranks: one rank's OOM makes all repeat the step, none waits for ever, and the weights are those of the undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from versions import needs_reset_of_fsdp

PROGRAM = Path(__file__).parent / "protected_ranks.py"
ROOT = Path(__file__).parents[2]

# place "step,micro-batch" -> [rank, phase, samples that fit]; with accumulation 3, micro-batch 2 is the one that exchanges gradients
EVERY_PHASE = {
    "0,0": [[1, "forward", 2]],
    "1,1": [[1, "backward", 2]],
    "2,2": [[1, "forward", 2]],
    "3,2": [[1, "inputs", 2]],
    "4,2": [[0, "forward", 2], [1, "inputs", 1]],
}
SHARDED = {  # backward also where gradients are scattered
    "0,0": [[1, "forward", 2]],
    "1,2": [[0, "backward", 2]],
    "2,0": [[0, "backward", 1], [1, "forward", 3]],
    "3,2": [[1, "inputs", 2]],
    "4,1": [[1, "backward", 2]],
}
NO_ACCUMULATION = {"0,0": [[1, "forward", 2]], "2,0": [[3, "inputs", 1]], "3,0": [[0, "forward", 1], [2, "forward", 2]]}


def run_ranks(world: int, schedule: dict[str, Any], accumulation: int, folder: Path, kind: str = "ddp") -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with contextlib.ExitStack() as stack:  # closes the pipes and waits, after the kills
        processes = []
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(schedule), str(folder), str(accumulation), kind],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    # anywhere in the line: a progress bar on stderr ends without a newline
    lines = [line.partition("RESULT ")[2] for output in outputs for line in output.splitlines() if "RESULT " in line]
    assert len(lines) == world, outputs
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "schedule", "accumulation", "kind"),
    [
        (2, EVERY_PHASE, 3, "ddp"),
        (4, NO_ACCUMULATION, 1, "ddp"),
        pytest.param(2, SHARDED, 3, "fsdp", marks=needs_reset_of_fsdp),
        pytest.param(4, NO_ACCUMULATION, 1, "fsdp", marks=needs_reset_of_fsdp),
    ],
)
def test_all_ranks_repeat_the_step_together(tmp_path: Path, world: int, schedule: dict[str, Any], accumulation: int, kind: str) -> None:
    results = run_ranks(world, schedule, accumulation, tmp_path, kind)
    failed = {failure.split()[0] for result in results for failure in result["failures"]}
    assert failed == set(schedule)
    for result in results:
        assert result["step"] == 5
        assert result["difference"] < 1e-9
        assert result["loss_difference"] < 1e-5
        assert result["tokens"] == result["plain_tokens"]
