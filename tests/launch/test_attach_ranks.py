"""Several ranks under `hfopt run --nproc`: planned once, the same on all, and every optimizer step takes its effective batch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from versions import RESETS_FSDP

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "scripts" / "counted.py"
PER_RANK = 2 * 4  # the script's batch and accumulation


def hfopt_run(world: int, folder: Path, kind: str, trouble: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "hfopt", "run", "--nproc", str(world), str(SCRIPT), str(folder), kind, trouble]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=400, check=False)


def samples_of_each_step(folder: Path, world: int) -> dict[int, list[int]]:
    """All ranks together, as the step was taken last: a restart repeats the steps after its checkpoint."""
    taken: dict[int, dict[int, list[int]]] = {}
    for rank in range(world):
        for line in (folder / f"steps.{rank}").read_text().splitlines():
            entry = json.loads(line)
            taken.setdefault(entry["step"], {})[rank] = entry["rows"]
    return {step: [row for rows in ranks.values() for row in rows] for step, ranks in taken.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kind", "trouble", "restarts"),
    [(2, "ddp", "optimizer", 1), (4, "ddp", "forward", 0), (2, "fsdp", "forward", int(not RESETS_FSDP))],
)
def test_every_step_takes_its_effective_batch(tmp_path: Path, world: int, kind: str, trouble: str, restarts: int) -> None:
    run = hfopt_run(world, tmp_path, kind, trouble)
    assert run.returncode == 0, run.stderr[-3000:]
    ranks: list[dict[str, Any]] = [json.loads(found) for found in re.findall(r"RESULT (\{[^{}]*\})", run.stdout)]
    assert [rank["step"] for rank in ranks] == [4] * world
    assert all(rank["batch"] * rank["accumulation"] == PER_RANK for rank in ranks)
    assert all(rank["model"].startswith("FSDP") == (kind == "fsdp") for rank in ranks)
    assert len({json.dumps(rank["losses"]) for rank in ranks}) == 1
    assert run.stderr.count("hfopt: planned: per_device_train_batch_size 2 → 8") == 1, "a restart keeps its plan"
    assert run.stderr.count("Restart 1 of at most 3, resuming from") == run.stderr.count("Restart") == restarts
    assert (tmp_path / "happened").exists()
    steps = samples_of_each_step(tmp_path, world)
    assert sorted(steps) == [1, 2, 3, 4]
    assert all(len(rows) == len(set(rows)) == PER_RANK * world for rows in steps.values())
    assert (tmp_path / "out" / "hfopt" / "monitor.jsonl").is_file()


@pytest.mark.slow
def test_a_sharded_run_resumed_in_smaller_pieces_ends_where_the_undisturbed_one_does(tmp_path: Path) -> None:
    ended = []
    for trouble in ("none", "optimizer"):
        (tmp_path / trouble).mkdir()
        run = hfopt_run(2, tmp_path / trouble, "fsdp", trouble)
        assert run.returncode == 0, run.stderr[-3000:]
        ended.append(json.loads(re.findall(r"RESULT (\{[^{}]*\})", run.stdout)[0]))
    undisturbed, resumed = ended
    assert (undisturbed["batch"], resumed["batch"]) == (8, 4)
    assert resumed["losses"] == pytest.approx(undisturbed["losses"], rel=1e-4)
    assert samples_of_each_step(tmp_path / "none", 2).keys() == samples_of_each_step(tmp_path / "optimizer", 2).keys()
    for step, rows in samples_of_each_step(tmp_path / "none", 2).items():
        assert sorted(rows) == sorted(samples_of_each_step(tmp_path / "optimizer", 2)[step])


LAUNCHED = """
import json, os, pathlib, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Told(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        told = [args.world_size, args.per_device_train_batch_size, args.gradient_accumulation_steps, str(args.device)]
        pathlib.Path(sys.argv[1], f"rank{args.process_index}.json").write_text(json.dumps(told))

data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(64)]
args = TrainingArguments("out", per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, report_to=[], disable_tqdm=True)
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0))
Trainer(model, args, train_dataset=data, callbacks=[Told()]).train()
"""
ACCELERATE = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize(
    "launcher", [[*ACCELERATE, "--dynamo_backend", "no", "--main_process_port", "0"], TORCHRUN], ids=["accelerate", "torchrun"]
)
def test_a_launchers_ranks_take_one_plan_on_virtual_cards(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    inside = [sys.executable, "-m", "hfopt", "run", *launcher, str(script), str(tmp_path)]
    command = [sys.executable, "-m", "hfopt", "rehearse", "--gpu", "rtx 3090", "--num-gpus", "2", "--", *inside]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "not planned" not in done.stderr
    assert [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)] == [[2, 8, 1, "cuda:0"], [2, 8, 1, "cuda:1"]]
