"""HFGpuMonitor where a process of its own is needed: several ranks, the virtual GPU, W&B offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from watched import lines

from hfopt.hardware.catalog import find

TESTS = Path(__file__).parent.parent
HEAD = """
import os, sys, time
from pathlib import Path
import transformers
from watched import trainer, SlowCollator, Sentences
from hfopt.runtime.monitor import HFGpuMonitor
out = Path(sys.argv[1])
"""


def run(script: str, folder: Path, *, launcher: tuple[str, ...] = (), env: dict[str, str] | None = None) -> str:
    """Runs it with the folder as argument; its stderr."""
    file = folder / "script.py"
    file.write_text(HEAD + script)
    base = {**os.environ, **(env or {})}
    paths = [str(TESTS.parent), str(TESTS / "support"), *filter(None, [base.get("PYTHONPATH")])]
    environment = {**base, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, file, folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.mark.slow
def test_two_ranks_one_of_them_slow(tmp_path: Path) -> None:
    """Each rank has its own log; the first tells once, for all, that the second comes late, and where."""
    script = """
class Slow(transformers.Trainer):
    def training_step(self, *args, **kwargs):
        if self.args.process_index == 1:
            time.sleep(0.08)
        return super().training_step(*args, **kwargs)
trainer(out, HFGpuMonitor(), kind=Slow, ddp_backend="gloo", max_steps=16).train()
"""
    said = run(script, tmp_path, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    (finding,) = [line for line in lines(tmp_path, "finding") if line["cause"] == "slow_rank"]
    assert finding["evidence"]["rank"] == 1 and finding["evidence"]["lag_s"] == pytest.approx(0.08, abs=0.04)
    assert "before forward" in finding["message"]
    assert [line["rank"] for line in lines(tmp_path, "header", "monitor.rank1.jsonl")] == [1]
    (summary,) = lines(tmp_path, "summary")
    assert set(summary["ranks"]) == {"0", "1"}
    assert summary["metrics"]["hfopt/samples_per_s"] == pytest.approx(2 * 4 * 15 / summary["seconds"])
    assert said.count("15 steps in") == 1


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_on_the_virtual_gpu_its_card_and_torchs_memory_are_read(tmp_path: Path) -> None:
    from hfopt.virtual.launch import environment

    script = """
run = trainer(out, HFGpuMonitor(interval=0.1), collator=SlowCollator(0.05), use_cpu=False, dataset=Sentences(length=8))
run.train()
import json, torch
(out / "torch.json").write_text(json.dumps([str(torch.cuda.get_device_properties(0).uuid), torch.cuda.max_memory_reserved()]))
"""
    run(script, tmp_path, env=environment(find("RTX 3090")))
    uuid, reserved = json.loads((tmp_path / "torch.json").read_text())
    last = lines(tmp_path, "window")[-1]["window"]
    (card,) = last["gpus"]
    assert card["uuid"].endswith(uuid) and card["total_bytes"] == find("RTX 3090").memory_bytes
    assert last["reserved_peak_bytes"] == reserved and last["alloc_retries"] == 0
    assert last["tokens"] == 8 * last["samples"] and last["allocated_peak_bytes"] <= reserved
    (summary,) = lines(tmp_path, "summary")
    assert summary["off"] == {} and summary["metrics"]["hfopt/data_wait"] > 0.5
    (head,) = lines(tmp_path, "header")
    assert head["device"] == "cuda" and "3090" in head["gpus"][0]["name"]


@pytest.mark.slow
def test_metrics_reach_wandb_offline(tmp_path: Path) -> None:
    script = """
trainer(out, HFGpuMonitor(), report_to=["wandb"], run_name="x").train()
import json, wandb
(out / "summary.json").write_text(json.dumps(sorted(wandb.run.summary.keys())))
wandb.finish()
"""
    run(script, tmp_path, env={"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"})
    keys = json.loads((tmp_path / "summary.json").read_text())
    assert {"train/hfopt/samples_per_s", "train/hfopt/data_wait", "train/hfopt/step_s", "train/loss"} <= set(keys)
    (written,) = tmp_path.rglob("*.wandb")
    assert b"train/hfopt/data_wait" in written.read_bytes()
