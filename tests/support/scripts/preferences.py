"""TRL's own way in: TrlParser, a YAML or a command line, SFTTrainer or DPOTrainer, with an adapter on demand."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config


@dataclass
class ScriptArguments:
    train_file: str = "train.json"
    cache: str = "cache"
    method: str = "sft"


def main() -> None:
    import sys

    config = DPOConfig if "dpo" in sys.argv else SFTConfig
    script_args, training_args, model_args = TrlParser((ScriptArguments, config, ModelConfig)).parse_args_and_config()
    data = load_dataset("json", data_files={"train": script_args.train_file}, cache_dir=script_args.cache)["train"]
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    kind = DPOTrainer if script_args.method == "dpo" else SFTTrainer
    trainer = kind(model=model, args=training_args, train_dataset=data, processing_class=tokenizer, peft_config=get_peft_config(model_args))
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
