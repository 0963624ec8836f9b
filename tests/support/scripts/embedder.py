"""An embedding model: a loss of its own, a module that holds the model and compares each text with the others of its batch."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments, set_seed


class InBatchNegatives(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, anchors: dict, positives: dict) -> torch.Tensor:
        first, second = (
            torch.nn.functional.normalize(self.model(**side).last_hidden_state.mean(1), dim=-1) for side in (anchors, positives)
        )
        return torch.nn.functional.cross_entropy(20 * first @ second.T, torch.arange(len(first), device=first.device))


class EmbeddingTrainer(Trainer):
    def __init__(self, *args: object, loss: torch.nn.Module, **more: object) -> None:
        super().__init__(*args, **more)
        self.loss = loss

    def compute_loss(self, model: object, inputs: dict, return_outputs: bool = False, num_items_in_batch: object = None) -> object:
        sides = (
            {name.split("_", 1)[1]: value for name, value in inputs.items() if name.startswith(side)} for side in ("anchor", "positive")
        )
        return self.loss(*sides)


class Holder(torch.nn.Module):
    """What sentence-transformers' models are to the Trainer: a module around a backbone."""

    def __init__(self, backbone: torch.nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, **inputs: torch.Tensor) -> object:
        return self.backbone(**inputs)


def main() -> None:
    output_dir, model_path, train_file, *settings = sys.argv[1:]
    given = {name.removeprefix("--"): json.loads(value) for name, value in zip(settings[::2], settings[1::2], strict=True)}
    training_args = TrainingArguments(output_dir=output_dir, remove_unused_columns=False, **given)
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = Holder(AutoModel.from_pretrained(model_path))
    rows = [json.loads(line) for line in Path(train_file).read_text().splitlines()]

    def collate(samples: list) -> dict:
        inputs = {}
        for side, column in (("anchor", "sentence1"), ("positive", "sentence2")):
            made = tokenizer([sample[column] for sample in samples], padding=True, return_tensors="pt")
            inputs |= {f"{side}_{name}": value for name, value in made.items()}
        return inputs

    trainer = EmbeddingTrainer(model=model, args=training_args, train_dataset=rows, data_collator=collate, loss=InBatchNegatives(model))
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
