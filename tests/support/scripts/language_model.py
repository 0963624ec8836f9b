"""A causal or masked language model on lines of text, joined and cut into blocks; with --stream the data can be read only in order."""

from dataclasses import dataclass
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    cache: str = "cache"
    block_size: int = 16
    masked: bool = False
    stream: bool = False


def main() -> None:
    arguments, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": arguments.train_file}
    raw = load_dataset("text", data_files=files, cache_dir=arguments.cache, streaming=arguments.stream)["train"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    kind = AutoModelForMaskedLM if arguments.masked else AutoModelForCausalLM
    model = kind.from_pretrained(arguments.model_name_or_path)
    tokens = raw.map(lambda rows: {"input_ids": tokenizer(rows["text"])["input_ids"]}, batched=True, remove_columns=["text"])

    def blocks(rows: dict) -> dict:
        joined = list(chain(*rows["input_ids"]))
        cut = [joined[i : i + arguments.block_size] for i in range(0, len(joined) - arguments.block_size, arguments.block_size)]
        return {"input_ids": cut} if arguments.masked else {"input_ids": cut, "labels": [list(row) for row in cut]}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokens.map(blocks, batched=True),
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3) if arguments.masked else default_data_collator,
    )
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
