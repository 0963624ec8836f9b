"""A text classifier: three groups of arguments, a JSON file, padding when the data is prepared, metrics and an evaluation."""

import sys
from dataclasses import dataclass, field

import numpy
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "a JSON file with sentence1, sentence2 and label"})
    cache: str = "cache"
    max_seq_length: int = 24


@dataclass
class ModelArguments:
    model_name_or_path: str = "bert"


def main() -> None:
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        model_args, data_args, training_args = parser.parse_json_file(json_file=sys.argv[1])
    else:
        model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load_dataset("json", data_files={"train": data_args.train_file}, cache_dir=data_args.cache)["train"]
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, num_labels=3)

    def prepare(rows: dict) -> dict:
        texts = (rows["sentence1"], rows["sentence2"])
        return {
            **tokenizer(*texts, padding="max_length", max_length=data_args.max_seq_length, truncation=True),
            "label": rows["label"],
        }

    prepared = raw.map(prepare, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=prepared,
        eval_dataset=prepared.select(range(12)),
        compute_metrics=lambda p: {"accuracy": float((numpy.argmax(p.predictions, axis=1) == p.label_ids).mean())},
        processing_class=tokenizer,
    )
    result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
