"""HFGpuMonitor where a process of its own is needed: several ranks, the virtual GPU, W&B offline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nvml_standin import NvmlStandin
from watched import lines

from hfopt.hardware.catalog import find

TESTS = Path(__file__).parent.parent
HEAD = """
import os, sys, time
from pathlib import Path
import transformers
from watched import trainer, SlowCollator, Sentences
from hfopt.monitor.callback import HFGpuMonitor
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
            time.sleep(0.2)
        return super().training_step(*args, **kwargs)
trainer(out, HFGpuMonitor(), kind=Slow, ddp_backend="gloo", max_steps=16).train()
"""
    said = run(script, tmp_path, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    (finding,) = [line for line in lines(tmp_path, "finding") if line["cause"] == "slow_rank"]
    assert finding["evidence"]["rank"] == 1 and finding["evidence"]["lag_s"] == pytest.approx(0.2, abs=0.1)
    assert "before forward" in finding["message"]
    assert [line["rank"] for line in lines(tmp_path, "header", "monitor.rank1.jsonl")] == [1]
    (summary,) = lines(tmp_path, "summary")
    assert set(summary["ranks"]) == {"0", "1"}
    assert summary["metrics"]["hfopt/samples_per_s"] == pytest.approx(2 * 4 * 15 / summary["seconds"])
    assert said.count("15 steps in") == 1


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_on_the_virtual_gpu_its_card_and_torchs_memory_are_read(tmp_path: Path) -> None:
    from hfopt.virtual.environment import environment

    script = """
run = trainer(out, HFGpuMonitor(interval=0.1), collator=SlowCollator(0.1), use_cpu=False, tf32=True, dataset=Sentences(length=8))
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


FAULTS = """
import ctypes, torch
from transformers import TrainerCallback
from hfopt.monitor import sampler
sampler._MOST_OF_TIME = 1.0  # readings at their interval also where one is slow

class Break(TrainerCallback):
    def __init__(self, how):
        self.how = how
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            self.how()
            until = time.monotonic() + 60
            while self.how in (lose_the_card, unload_the_driver) and not monitor._session.faults.off and time.monotonic() < until:
                time.sleep(0.02)  # the next reading finds it, whenever that is

def lose_the_card():
    with open(os.environ["HFOPT_NVML_STANDIN"], "a") as answers:
        answers.write("0.lost 1\\n")

def unload_the_driver():
    ctypes.CDLL("libnvidia-ml.so.1").nvml_standin_restart()

def fill_the_disk():
    log = out / "full" / "hfopt" / "monitor.jsonl"
    log.unlink()
    log.symlink_to("/dev/full")
    monitor._session.journal._log.close()

(out / "file").write_text("")
for name, how, options in [
    ("disk full", fill_the_disk, {}),
    ("unwritable", lambda: None, {"output": out / "file" / "sub"}),
    ("driver gone", unload_the_driver, {}),
    ("card lost", lose_the_card, {}),
]:
    folder = out / name.split()[-1] if name == "disk full" else out / name.replace(" ", "_")
    monitor = HFGpuMonitor(interval=0.02, **options)
    run = trainer(folder, monitor, collator=SlowCollator(0.03), use_cpu=False, logging_steps=1)
    run.add_callback(Break(how))
    print("BEGIN", name, file=sys.stderr)
    done = run.train()
    assert torch.cuda.is_available() and run.args.device.type == "cuda"
    print("STEPS", done.global_step, file=sys.stderr)
"""


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_faults_in_the_middle_of_a_run_on_the_virtual_gpu(tmp_path: Path, nvml_standin: NvmlStandin) -> None:
    """Training goes on to its last step, and each fault is told in one line that names what is off."""
    from hfopt.virtual.environment import environment

    gpu = find("RTX 3090")
    env = environment(gpu)
    ask = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(0)))"
    uuid = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True).stdout.strip()
    nvml_standin.card(0, name=gpu.name, uuid=uuid, total_mib=gpu.memory_bytes >> 20, util=50)
    cuda_only = ":".join(library for library in env["LD_PRELOAD"].split(":") if "nvml" not in library)
    said = run(FAULTS, tmp_path, env={**env, **nvml_standin.environment, "LD_PRELOAD": cuda_only})
    runs = {part.partition("\n")[0].strip(): part for part in said.split("BEGIN")[1:]}
    off, unwritten = (
        {name: [line for line in part.splitlines() if words in line] for name, part in runs.items()}
        for words in ("is switched off", "cannot be written")
    )
    assert all("STEPS 12" in part for part in runs.values()), said[-3000:]
    assert {name: len(told) for name, told in off.items() if name in ("driver gone", "card lost")} == {"driver gone": 1, "card lost": 1}
    assert "GPU readings" in off["driver gone"][0] and uuid in off["card lost"][0]
    for name in ("disk full", "unwritable"):  # the log, and for a path that is no folder the live view too; both are tried again
        assert 1 <= len(unwritten[name]) == len(set(unwritten[name])) <= 2 and "the log file" in "".join(unwritten[name])
        assert off[name] == []


@pytest.mark.virtual_gpu
@pytest.mark.slow
def test_padding_on_a_card_is_counted_without_waiting_for_it(tmp_path: Path) -> None:
    """torch itself raises at anything that would wait for the card."""
    from hfopt.virtual.environment import environment

    script = """
import torch
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.model_inputs import InputWatch
from watched import tiny_model
model, told = tiny_model().to("cuda").train(), []
watch = InputWatch(Faults(told.append))
watch.attach(model)
ids = torch.ones(4, 8, dtype=torch.long, device="cuda")
mask = torch.ones(4, 8, dtype=torch.long)
mask[:, 5:] = 0
mask = mask.to("cuda")
torch.cuda.set_sync_debug_mode("error")
for _ in range(4):
    watch._before(model, (), {"input_ids": ids, "attention_mask": mask})
torch.cuda.set_sync_debug_mode("default")
print(watch.take(), told, file=sys.stderr)
"""
    said = run(script, tmp_path, env=environment(find("RTX 3090")))
    assert said.splitlines()[-1] == "(16, 128, 0.375, True) []"


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
