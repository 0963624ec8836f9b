"""A summarizer: Seq2SeqTrainer, targets padded with -100, label smoothing by argument."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    cache: str = "cache"


def main() -> None:
    arguments, training_args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load_dataset("json", data_files={"train": arguments.train_file}, cache_dir=arguments.cache)["train"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path)

    def prepare(rows: dict) -> dict:
        inputs = tokenizer(rows["sentence1"], max_length=24, truncation=True)
        return {**inputs, "labels": tokenizer(text_target=rows["sentence2"], max_length=8, truncation=True)["input_ids"]}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=raw.map(prepare, batched=True, remove_columns=raw.column_names),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    )
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
