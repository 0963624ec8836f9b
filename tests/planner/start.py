"""One rank of a training started from a planned YAML; a program that test_start.py starts under torchrun.

It leaves what it saw as JSON beside the model.

The YAML is read as a user's script reads it. accelerate knows FSDP on accelerators only, so on the CPU it is told that this is one.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


class Counted(TrainerCallback):
    """Samples of all ranks in each optimizer step."""

    def __init__(self) -> None:
        self.seen = 0
        self.steps: list[int] = []

    def collate(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.stack(samples)
        return {"input_ids": ids, "labels": ids.clone()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        total = torch.tensor(self.seen, device=args.device)
        dist.all_reduce(total)
        self.steps.append(int(total))
        self.seen = 0


class Counting(Trainer):
    counted: Counted

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.counted.seen += len(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)


def main(path: str, model_folder: str) -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_yaml_file(path, allow_extra_keys=True)
    if args.device.type == "cpu" and args.fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp._fully_shard import _fully_shard

        _fully_shard._init_default_mesh = lambda *_, **__: init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    counted = Counted()
    data = [torch.randint(3, 100, (12,), generator=torch.Generator().manual_seed(i)) for i in range(512)]
    trainer = Counting(model=model, args=args, train_dataset=data, data_collator=counted.collate, callbacks=[counted])
    trainer.counted = counted
    trainer.train()
    sharded = sum(type(parameter).__name__ == "DTensor" for parameter in trainer.model.parameters())
    result = {"steps": counted.steps, "sharded": sharded, "model": type(trainer.model_wrapped).__name__}
    # a file for each rank: two ranks that share one pipe write into each other's lines
    Path(model_folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
