"""A run that waits for its data: the monitor says so, the plan mends it, and the second run is measured against the first."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hfopt


class RemoteReviews(torch.utils.data.Dataset):
    """Each sample comes over a slow line: 10 milliseconds of waiting."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(0.01)
        ids = torch.randint(3, 1000, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": index % 2}


def build(args: TrainingArguments, plan: Any = None) -> Trainer:
    config = BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    return Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=RemoteReviews(),
        callbacks=[hfopt.HFGpuMonitor(plan=plan)],
    )


def arguments(folder: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        max_steps=40,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/slow_dataset")
    before, after = folder / "before", folder / "after"
    build(arguments(before)).train()

    plan = hfopt.plan(build(arguments(after)), keep=frozenset({"bf16", "gradient_checkpointing"}))
    print(plan.report())
    build(plan.apply(arguments(after)), plan).train()

    page = folder / "before_and_after.html"
    command = [sys.executable, "-m", "hfopt", "report", str(before), str(after), "--html", str(page)]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"page in {page}")


main()
