"""An image classifier: pictures decoded and changed at random when they are read, unused columns kept, arguments made by hand."""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments, set_seed


def main() -> None:
    output_dir, model_path, *settings = sys.argv[1:]
    given = {name.removeprefix("--"): json.loads(value) for name, value in zip(settings[::2], settings[1::2], strict=True)}
    training_args = TrainingArguments(output_dir=output_dir, remove_unused_columns=False, **given)
    set_seed(training_args.seed)
    model = AutoModelForImageClassification.from_pretrained(model_path)

    def read(rows: dict) -> dict:
        pictures = [torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in rows["seed"]]
        return {"pixel_values": [picture.flip(2) if torch.rand(1) < 0.5 else picture for picture in pictures], "label": rows["label"]}

    data = Dataset.from_dict({"seed": list(range(64)), "label": [seed % 2 for seed in range(64)]}).with_transform(read)

    def collate(samples: list) -> dict:
        pixels = torch.stack([sample["pixel_values"] for sample in samples])
        return {"pixel_values": pixels, "labels": torch.tensor([sample["label"] for sample in samples])}

    trainer = Trainer(model=model, args=training_args, train_dataset=data, data_collator=collate)
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
