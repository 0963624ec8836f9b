"""A Trainer with a loss of its own runs out of memory, and ends with the weights of a run that did not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import hfopt


class FocalTrainer(Trainer):
    """Looks harder at what it gets wrong. How such a loss is put together from pieces, hfopt finds out by trying."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        each = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none")
        loss = ((1 - torch.exp(-each)) ** 2 * each).mean()
        return (loss, outputs) if return_outputs else loss


class Reviews(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": int(ids[0]) % 3}


def too_small_for(most: int) -> Any:
    """A hook that behaves like a card with room for so many samples."""

    def check(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled() and len(output) > most:
            raise torch.OutOfMemoryError(f"CUDA out of memory (pretended here: {len(output)} samples, room for {most})")

    return check


def weights_after(folder: Path, *, room_for: int | None) -> torch.Tensor:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0  # pieces would draw other masks than the whole
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=1e-3,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = FocalTrainer(model=BertForSequenceClassification(config), args=args, train_dataset=Reviews())
    if room_for is not None:
        trainer.model.bert.embeddings.register_forward_hook(too_small_for(room_for))
        hfopt.protect(trainer)
    trainer.train()
    return torch.cat([p.detach().flatten().cpu() for p in trainer.model.parameters()])


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/custom_compute_loss")
    undisturbed = weights_after(folder / "undisturbed", room_for=None)
    recovered = weights_after(folder / "recovered", room_for=4)
    print(f"relative difference of the weights: {(recovered - undisturbed).norm() / undisturbed.norm():.1e}")


main()
