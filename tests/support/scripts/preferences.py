"""TRL's own way in: TrlParser, a YAML or a command line, the trainer of one of its methods, with an adapter on demand."""

import importlib
import sys
from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import ModelConfig, TrlParser, get_peft_config

METHODS = {
    "sft": ("trl", "SFT"),
    "dpo": ("trl", "DPO"),
    "reward": ("trl", "Reward"),
    "kto": ("trl", "KTO"),
    "cpo": ("trl.experimental.cpo", "CPO"),
    "orpo": ("trl.experimental.orpo", "ORPO"),
}


@dataclass
class ScriptArguments:
    train_file: str = "train.json"
    cache: str = "cache"
    method: str = "sft"


def main() -> None:
    method = sys.argv[sys.argv.index("--method") + 1] if "--method" in sys.argv else "sft"
    package, name = METHODS[method]
    module = importlib.import_module(package)
    config, kind = getattr(module, f"{name}Config"), getattr(module, f"{name}Trainer")
    script_args, training_args, model_args = TrlParser((ScriptArguments, config, ModelConfig)).parse_args_and_config()
    data = load_dataset("json", data_files={"train": script_args.train_file}, cache_dir=script_args.cache)["train"]
    set_seed(training_args.seed)  # a new head is drawn
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    if method == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    trainer = kind(model=model, args=training_args, train_dataset=data, processing_class=tokenizer, peft_config=get_peft_config(model_args))
    result = trainer.train()
    trainer.save_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
