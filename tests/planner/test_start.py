"""The YAML that a plan writes starts as it is: two gloo ranks on the CPU, with the effective batch counted sample by sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.planner import Request, plan

PROGRAM = Path(__file__).parent / "start.py"
ROOT = Path(__file__).parents[2]
RANKS = 2
BATCH, ACCUMULATION = 2, 3


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "dtype": "float32", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(model))
    run = {"output_dir": str(tmp_path / "out"), "max_steps": 2, "report_to": "none", "save_strategy": "no"}
    batch = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATION}
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(tmp_path), "max_length": 12, **batch, **run}))
    return path


def started(config: Path, engine: str) -> list[dict[str, Any]]:
    keep = frozenset({"gradient_accumulation_steps", "bf16", "fp16", "tf32"})
    made = plan(config, Request(gpu="A100 SXM 80GB", num_gpus=RANKS, engine=engine, dry_run=False, keep=keep))
    planned = config.with_name("planned.yaml")
    planned.write_text(made.to_yaml() + "use_cpu: true\n")  # planned for cards, started where there are none
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    done = subprocess.run(
        [*command, str(PROGRAM), str(planned), str(config.parent)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    results = [config.with_name(f"rank{rank}.json") for rank in range(RANKS)]
    assert all(result.exists() for result in results), done.stdout + done.stderr
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.slow
def test_fsdp2_starts_from_the_planned_yaml(config: Path) -> None:
    for rank in started(config, "fsdp2"):
        assert rank["sharded"] > 0 and rank["model"].startswith("FSDP")
        assert rank["steps"] == [BATCH * ACCUMULATION * RANKS] * 2


@pytest.mark.slow
def test_ddp_starts_from_the_planned_yaml(config: Path) -> None:
    for rank in started(config, "ddp"):
        assert rank["sharded"] == 0 and rank["model"] == "DistributedDataParallel"
        assert rank["steps"] == [BATCH * ACCUMULATION * RANKS] * 2
