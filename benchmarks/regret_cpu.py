"""What the plan's choice loses against the best of all, on this CPU, where everything can be measured.

usage: python benchmarks/regret_cpu.py [MODEL ...]

Three small models. For each: `hfopt plan` for the CPU (which times a few candidates itself), then an exhaustive grid of real Trainer runs
over every divisor of the effective batch. Throughputs of plan and grid come from the same runs, one thread, interleaved, the best of a few
rounds; they are judged by the CPU time of a step, which other work on the machine does not stretch, and shown by the clock as well. Each
run is a process of its own, as training is: what an earlier run left in the C library's heap made batch 4 a third faster than it is. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from hfopt.model.from_config import from_spec
from hfopt.planner import Request, plan
from hfopt.schema import TrainJob
from hfopt.units import divisors

ROUNDS = 3
STEPS = 6
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bert": (
        {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "intermediate_size": 256, "vocab_size": 5000},
        {"max_seq_length": 64, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8},
    ),
    "gpt2": (
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 5000,
         "n_positions": 256},
        {"max_seq_length": 128, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8},
    ),
    "vit": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "intermediate_size": 256, "image_size": 64, "patch_size": 8},
        {"image_size": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 32},
    ),
}  # fmt: skip


class Timer(TrainerCallback):
    """Seconds of each optimizer step: of the CPU, and by the clock."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self._began = 0.0, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.process_time(), time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.cpu.append(time.process_time() - self._began[0])
        self.wall.append(time.perf_counter() - self._began[1])


def real_run(job: TrainJob, batch: int, folder: str) -> tuple[float, float]:
    """The fastest optimizer step of a short real Trainer run: (CPU, clock)."""
    torch.set_num_threads(1)
    workload, accumulation = from_spec(job.model, job.data), job.effective_batch // batch
    rows = range(batch * accumulation * (STEPS + 1))  # what a sample is, is decided when the batch is made, as in the plan's own runs
    timer = Timer()
    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", max_steps=STEPS + 1,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=workload.build_model(),
        args=arguments,
        train_dataset=list(rows),
        data_collator=lambda items: workload.make_batch(len(items)),
        callbacks=[timer],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return min(timer.cpu[1:]), min(timer.wall[1:])


def one_model(name: str, folder: Path) -> dict[str, Any]:
    config, settings = MODELS[name]
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(folder), "output_dir": str(folder / "out"), **settings}))
    made = plan(path, Request(gpu=None, allow=frozenset({"accumulation"})))
    chosen = made.candidate.per_device_batch
    effective, job = made.facts.effective_batch, made.facts.job
    plain = replace(job, raw=dict(job.raw), model=replace(job.model, overrides=dict(job.model.overrides)))
    cpu: dict[int, float] = {}
    wall: dict[int, float] = {}
    for _ in range(ROUNDS):
        for batch in divisors(effective):
            with multiprocessing.get_context("forkserver").Pool(1) as fresh:
                cpu_s, wall_s = fresh.apply(real_run, (plain, batch, str(folder / "out")))
            cpu[batch], wall[batch] = min(cpu.get(batch, cpu_s), cpu_s), min(wall.get(batch, wall_s), wall_s)
    best = min(cpu, key=lambda batch: cpu[batch])
    share = cpu[best] / cpu[chosen]
    table = ", ".join(f"{batch}: {effective / took_s:.0f}/s" for batch, took_s in cpu.items())
    print(
        f"{name:5} chose {chosen} × {effective // chosen}, best {best} × {effective // best}: {100 * share:.1f} % of the best ({table})",
        flush=True,
    )
    return {
        "share_of_best": round(share, 4),
        "share_of_best_by_the_clock": round(min(wall.values()) / wall[chosen], 4),
        "as_configured": round(cpu[best] / cpu[settings["per_device_train_batch_size"]], 4),
        "plan_runs": made.trial_runs,
        "grid_runs": len(cpu),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    chosen = parser.parse_args().models
    os.environ["OMP_NUM_THREADS"] = "1"  # of the plan's own dry runs
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "transformers.trainer", "hfopt.model.from_config"])
    result = {}
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = one_model(name, Path(folder))
    worst = min(item["share_of_best"] for item in result.values())
    print(json.dumps({"worst_share_of_best": worst, **result}))


if __name__ == "__main__":
    main()
