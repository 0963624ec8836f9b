"""An image classifier, planned from its TrainingArguments and the folder of its model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageClassification, Trainer, TrainingArguments

import hfopt

MODEL = Path(__file__).parent / "model"


class Pictures(torch.utils.data.Dataset):
    """Noise with one bright quarter, which is the label."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        picture = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(index))
        row, column = divmod(index % 4, 2)
        picture[:, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16] += 2
        return {"pixel_values": picture, "labels": index % 4}


def main() -> None:
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/vit",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        learning_rate=2e-3,
        max_steps=24,
        logging_steps=8,
        save_strategy="no",
        report_to=[],
    )
    plan = hfopt.plan(args, model=str(MODEL))  # on another card: gpu="l4"
    print(plan.report())

    trainer = Trainer(
        model=AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(MODEL, num_labels=4)),
        args=plan.apply(args),
        train_dataset=Pictures(),
        callbacks=[hfopt.HFGpuMonitor(plan=plan)],
    )
    hfopt.protect(trainer).train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {trainer.state.global_step} steps")


main()
