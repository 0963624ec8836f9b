"""A text classifier: planned from its YAML, watched while it trains, and protected against running out of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification, HfArgumentParser, Trainer, TrainingArguments

import hfopt

HERE = Path(__file__).parent


class Reviews(torch.utils.data.Dataset):
    """32 random tokens; the first one says whether the review is good."""

    def __init__(self, count: int, seed: int) -> None:
        self.ids = torch.randint(3, 1000, (count, 32), generator=torch.Generator().manual_seed(seed))
        self.ids[:, 0] = 10 + torch.arange(count) % 2

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "attention_mask": torch.ones(32, dtype=torch.long), "labels": index % 2}


def accuracy(outcome: Any) -> dict[str, float]:
    return {"accuracy": float((outcome.predictions.argmax(-1) == outcome.label_ids).mean())}


def main() -> None:
    # For the card that is here, or the CPU. Without `allow`, the accumulation stays: transformers makes the gradients of BERT's head as
    # many times too large as there are micro-batches, so that trading them for batch changes what is learned. The line with
    # model_accepts_loss_kwargs below mends that, and the plan is free.
    plan = hfopt.plan(HERE / "train.yaml", allow=frozenset({"accumulation"}), dry_run=False)
    print(plan.report())

    settings = yaml.safe_load(plan.to_yaml())  # the same YAML, other values
    if len(sys.argv) > 1:
        settings["output_dir"] = sys.argv[1]
    (args,) = HfArgumentParser(TrainingArguments).parse_dict(settings, allow_extra_keys=True)
    trainer = Trainer(
        model=AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(HERE / "model", num_labels=2)),
        args=args,
        train_dataset=Reviews(512, seed=0),
        eval_dataset=Reviews(64, seed=1),
        compute_metrics=accuracy,
        callbacks=[hfopt.HFGpuMonitor(plan=plan)],
    )
    trainer.model_accepts_loss_kwargs = False
    hfopt.protect(trainer).train()
    print(
        f"accuracy {trainer.evaluate()['eval_accuracy']:.2f} after {trainer.state.global_step} steps; now: hfopt report {args.output_dir}"
    )


main()
