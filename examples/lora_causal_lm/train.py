"""A causal LM with LoRA, planned from the live Trainer: for the machine here, and for a card that is not here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfopt

LENGTH = 64


class Songs(torch.utils.data.Dataset):
    """Each counts upwards from somewhere."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = (index + torch.arange(LENGTH)) % 500
        return {"input_ids": ids, "labels": ids.clone()}


def build(args: TrainingArguments) -> Trainer:
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
        )
    )
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    return Trainer(model=model, args=args, train_dataset=Songs())


def main() -> None:
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/lora_causal_lm",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        learning_rate=5e-3,
        max_steps=12,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
    )
    elsewhere = hfopt.plan(build(args), gpu="rtx 4090")
    print(elsewhere.report())

    here = hfopt.plan(build(args))
    trainer = hfopt.protect(build(here.apply(args)), plan=here)
    trainer.train()
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    used = here.candidate
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"trained {trained:,} parameters at {used.per_device_batch} × {used.accumulation}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")


main()
