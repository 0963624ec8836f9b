"""TRL's trainers against PyTorch's own allocator: the benchmark's table, for a few of its cases."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "trl_accuracy.py"


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize(
    "title",
    [
        "SFT LoRA llama",
        "Reward qwen2",
        "SFT no checkpointing phi3",
        "DPO qwen2",
        "SFT packed llama",
        "GRPO beta qwen3",
        "Seq2Seq t5",
        "SFT padding-free gemma2",
    ],
)
def test_yaml_live_and_virtual_agree(title: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: its 1.0 asks for a newer transformers than the oldest here")
    command = [sys.executable, str(BENCHMARK), "--only", title, "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["complete"] == result["n"] == 1, done.stdout
    assert all(result[f"{pair}, most %"] <= 2 for pair in ("yaml to live", "yaml to virtual", "live to virtual")), done.stdout
    assert result["reserved, most under %"] <= 3 and result["least card, most under %"] <= 0, done.stdout
