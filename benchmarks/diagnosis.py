"""Is the right cause named? Runs made to be so on this machine, and synthesised traces for what needs a card, as a confusion table.

Real runs: a model that keeps the CPU busy, healthy in itself, made ill in one respect (a sleeping collator, evaluation or saving at every
step, a slow reporter, padding), a tiny model whose operations are too small, and two ranks of which one does more. Traces: one reading a
second of a card as NVML would give it, drawn around the figures of cards under such loads, with noise; not measured on a card.
Right is a run whose alarms are exactly the expected ones; compute_bound is no alarm.

usage: python benchmarks/diagnosis.py [--repeat 2] [--seeds 20] [--only NAME]        the last line is JSON
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from diagnosis_traces import TRACES
from transformers import Trainer, TrainerCallback, TrainingArguments

from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.diagnose import diagnose

GOOD = "compute_bound"
HEALTHY = "healthy"


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int = 512, length: int = 64, padding: int = 0) -> None:
        mask = torch.ones(length, dtype=torch.long)
        mask[length - padding :] = 0
        self.rows = [
            {"input_ids": torch.full((length,), index % 90 + 1), "attention_mask": mask, "labels": torch.tensor(index % 2)}
            for index in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Collator:
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.seconds:  # even a sleep of nothing gives the processor away
            time.sleep(self.seconds)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class SlowReporter(TrainerCallback):  # type: ignore[misc]
    """A metrics server that answers slowly."""

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.15)


class ExtraWork(Trainer):  # type: ignore[misc]
    """The second rank does more, before or after its backward."""

    where = "none"

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.where == "before" and self.args.process_index == 1:
            time.sleep(0.1)
        loss = super().training_step(*args, **kwargs)
        if self.where == "after" and self.args.process_index == 1:
            time.sleep(0.1)
        return loss


class OwnModule(torch.nn.Module):
    """A user's own tiny network; knows nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(input_ids.float())
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def train(
    folder: Path, *, hidden: int = 192, kind: Any = Trainer, callbacks: tuple[Any, ...] = (), wait_s: float = 0.0, **changed: Any
) -> None:
    length, padding, own = changed.pop("length", 64), changed.pop("padding", 0), changed.pop("model", None)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=2, intermediate_size=4 * hidden, num_labels=2
    )
    arguments = {
        "per_device_train_batch_size": 8,
        "max_steps": 16,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **changed,
    }
    trainer = kind(
        model=own() if own is not None else transformers.BertForSequenceClassification(config),
        args=TrainingArguments(str(folder), **arguments),
        train_dataset=Sentences(length=length, padding=padding),
        eval_dataset=Sentences(16, length=length),
        data_collator=Collator(wait_s),
        callbacks=[*callbacks, HFGpuMonitor()],
    )
    trainer.train()


RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (HEALTHY, {}),
    "with accumulation": (HEALTHY, {"gradient_accumulation_steps": 2, "max_steps": 8, "logging_steps": 2}),
    "a worker process": (HEALTHY, {"dataloader_num_workers": 1}),
    "some evaluation, one checkpoint": (HEALTHY, {"eval_strategy": "steps", "eval_steps": 8, "save_strategy": "steps", "save_steps": 16}),
    "larger model": (HEALTHY, {"hidden": 320, "max_steps": 10, "logging_steps": 2}),
    "sleeping collator": ("input_bound", {"wait_s": 0.15}),
    "sleeping collator in a worker": ("input_bound", {"wait_s": 0.5, "dataloader_num_workers": 1, "max_steps": 12}),
    "evaluation at every step": ("eval_heavy", {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}),
    "saving at every step": ("saving_heavy", {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}),
    "slow reporter": ("logging_heavy", {"callbacks": (SlowReporter(),), "logging_steps": 1}),
    "padded to twice the length": ("padding_waste", {"padding": 36}),
    "tiny model": ("launch_bound", {"hidden": 16, "length": 8, "max_steps": 60, "logging_steps": 10}),
    "tiny model, accumulation": (
        "launch_bound",
        {"hidden": 16, "length": 8, "max_steps": 30, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 2},
    ),
}
RUNS["tiny network of one's own"] = ("launch_bound", {"model": OwnModule, "length": 8, "max_steps": 80, "logging_steps": 20})
RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "two ranks": (HEALTHY, {"hidden": 320}),
    "a rank with extra work before": ("slow_rank", {"where": "before"}),
    "a rank with extra work after": ("slow_rank", {"where": "after"}),
    "a rank with slow data": ("slow_rank", {"slow_data": True}),
}


def alarms(folder: Path) -> set[str]:
    lines = [json.loads(line) for line in (folder / "hfopt" / "monitor.jsonl").read_text().splitlines()]
    resolved = {line["cause"] for line in lines if line["kind"] == "resolved"}
    return {line["cause"] for line in lines if line["kind"] == "finding"} - {GOOD} - resolved


def real_run(name: str) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):  # noqa: PTH123
            train(Path(folder), **RUNS[name][1])
        return alarms(Path(folder))


def ranks_run(name: str) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        done = subprocess.run([*command, "--worker", name, folder], capture_output=True, text=True, timeout=300, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        return alarms(Path(folder))


def worker(name: str, folder: Path) -> None:
    torch.set_num_threads(1)
    options = dict(RANKS[name][1])
    ExtraWork.where = options.pop("where", "none")
    slow = options.pop("slow_data", False) and os.environ["RANK"] == "1"
    train(folder, kind=ExtraWork, wait_s=0.1 if slow else 0.0, ddp_backend="gloo", **options)


def trace_run(name: str, seed: int) -> set[str]:
    window, run = TRACES[name][1](seed)
    return {finding.cause for finding in diagnose(window, run)} - {GOOD}


def judge(
    kind: str, name: str, expected: str, look: Callable[[], set[str]], times: int, table: Counter[tuple[str, str]]
) -> tuple[int, int]:
    right = 0
    for _ in range(times):
        found = look()
        right += found == ({expected} - {HEALTHY})
        table.update((expected, cause) for cause in found or {"nothing"})
    print(f"{kind:<7}{name:<34}{expected:<17}{right} of {times}", flush=True)
    return right, times


def show(table: Counter[tuple[str, str]]) -> None:
    rows, columns = sorted({row for row, _ in table}), sorted({column for _, column in table})
    print("\nconfusion: what was made (rows), what was found (columns)")
    for number, column in enumerate(columns):
        print(f"  {chr(97 + number)} = {column}")
    print(f"{'':<17}" + "".join(f"{chr(97 + number):>5}" for number in range(len(columns))))
    for row in rows:
        print(f"{row:<17}" + "".join(f"{table[row, column] or '.':>5}" for column in columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, default=2, help="of each real run")
    parser.add_argument("--seeds", type=int, default=20, help="of each trace")
    parser.add_argument("--only", help="runs whose name contains this")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if options.worker:
        worker(options.worker[0], Path(options.worker[1]))
        return
    table: Counter[tuple[str, str]] = Counter()
    scores: dict[str, list[tuple[str, int, int]]] = {"real": [], "trace": []}
    chosen = [name for name in (*RUNS, *RANKS, *TRACES) if not options.only or options.only in name]
    for name in chosen:
        if name in TRACES:
            seeds = iter(range(options.seeds))
            expected = TRACES[name][0]
            score = judge("trace", name, expected, lambda name=name, seeds=seeds: trace_run(name, next(seeds)), options.seeds, table)  # type: ignore[misc]
            scores["trace"].append((expected, *score))
        else:
            expected, look = (RUNS[name][0], real_run) if name in RUNS else (RANKS[name][0], ranks_run)
            score = judge("real", name, expected, lambda name=name, look=look: look(name), options.repeat, table)  # type: ignore[misc]
            scores["real"].append((expected, *score))
    show(table)
    answer: dict[str, Any] = {}
    for kind, rows in scores.items():
        made = [row for row in rows if row[0] != HEALTHY]
        healthy = [row for row in rows if row[0] == HEALTHY]
        answer[kind] = {
            "made_right": sum(row[1] for row in made),
            "made": sum(row[2] for row in made),
            "false_alarms": sum(row[2] - row[1] for row in healthy),
            "healthy": sum(row[2] for row in healthy),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
