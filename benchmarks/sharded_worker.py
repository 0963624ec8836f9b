"""One rank of a Trainer run on the virtual GPU; a program for torchrun, started by sharded_memory.py. Rank 0 prints its peaks as JSON.

Argument: a JSON object with `model` (fields of a LlamaConfig), `weights` (a dtype), `lora` (a rank or null), `batch`, `length` and
`arguments` (of TrainingArguments). The batch is the one hfopt traces with.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, ModelSpec

STEPS = 3


def model_of(case: dict[str, Any]) -> Any:
    model = LlamaForCausalLM._from_config(LlamaConfig(**case["model"]), dtype=getattr(torch, case["weights"]))
    if case["lora"] is None:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=case["lora"], target_modules="all-linear", task_type="CAUSAL_LM"))


def batch_of(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **case["model"]}
        Path(folder, "config.json").write_text(json.dumps(config))
        made: dict[str, torch.Tensor] = from_spec(ModelSpec(name=folder), DataSpec(max_length=case["length"])).make_batch(case["batch"])
        return made


def without_agreement() -> None:
    """Virtual cards send each other no values, so ranks cannot compare the order of modules ZeRO-3 saw with rank 0's."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def main(case: dict[str, Any]) -> None:
    if "deepspeed" in case["arguments"]:
        without_agreement()
    batch = batch_of(case)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=case["batch"],
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **case["arguments"],
    )
    trainer = Trainer(
        model=model_of(case),
        args=arguments,
        train_dataset=list(range(64 * case["batch"])),
        data_collator=lambda samples: {name: tensor.clone() for name, tensor in batch.items()},
    )
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        sys.stdout.write(f"PEAK {json.dumps(peaks)}\n")
        sys.stdout.flush()
    os._exit(0)  # process groups of the virtual GPU need no goodbye


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
