"""A rank's estimate against PyTorch's own allocator: the Trainer with FSDP2 on two virtual cards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_rank_of_fsdp2_takes_what_was_predicted() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "sharded_memory.py"), "--only", "fsdp2-2-sync"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True, timeout=600)
    result = json.loads(done.stdout.splitlines()[-1])
    for figure in ("allocated", "reserved"):
        assert result[figure]["n"] == 1
        assert result[figure]["max_pct"] <= 5
