"""An ordinary training script that knows nothing of hfopt: a GPT-2 in bf16, for `hfopt rehearse`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(0, 50257, (512,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output_dir", default="runs/rehearse_a100")
    options = parser.parse_args()
    args = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=options.batch,
        bf16=True,
        max_steps=1000,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=GPT2LMHeadModel(GPT2Config(n_layer=6)), args=args, train_dataset=Texts()).train()


main()
