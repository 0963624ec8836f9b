"""Two ranks under torchrun: watched and protected, with memory that runs out on one of them."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfopt

RANK = int(os.environ["RANK"])


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, 256, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def short_of_memory(module: Any, inputs: Any, output: Any) -> None:
    """Rank 1 behaves like a card with room for four samples."""
    if RANK == 1 and torch.is_grad_enabled() and len(output) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory (pretended here, on rank 1)")


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config)
    model.model.embed_tokens.register_forward_hook(short_of_memory)
    on_cpu = not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "runs/two_ranks",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Texts(), callbacks=[hfopt.HFGpuMonitor()])
    hfopt.protect(trainer).train()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    sys.stdout.write(f"rank {RANK}: step {trainer.state.global_step}, sum of the weights {total:.9f}\n")  # one write: lines do not mix


main()
