"""Several ranks: each writes down which samples its optimizer steps took. Arguments: output folder, ddp or fsdp, what goes wrong on rank 1.

What goes wrong (none, forward, optimizer) does so once: a marker in the folder says that it has.
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

FOLDER, KIND, TROUBLE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
RANK = int(os.environ["RANK"])
TAKEN = FOLDER / f"taken.{RANK}"  # a file: a list that grows with each call is state of the step, and such a step is not repeated


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict:
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(i))
        ids[0] = 3 + i % 61
        return {"input_ids": ids, "labels": ids.clone(), "row": i}


def collate(samples: list) -> dict:
    return {name: torch.stack([torch.as_tensor(sample[name]) for sample in samples]) for name in samples[0]}


def out_of_memory(*_: object) -> None:
    marker = FOLDER / "happened"
    if not marker.exists():
        marker.touch()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class Watched(TrainerCallback):
    def on_step_begin(self, args: object, state: object, control: object, model: object = None, **_: object) -> None:
        TAKEN.write_text("")
        if TROUBLE == "forward" and RANK == 1 and state.global_step == 2:
            model.model.layers[0].register_forward_pre_hook(out_of_memory)

    def on_pre_optimizer_step(self, args: object, state: object, *_: object, **__: object) -> None:
        if TROUBLE == "optimizer" and RANK == 1 and state.global_step == 2:
            out_of_memory()

    def on_step_end(self, args: object, state: object, *_: object, **__: object) -> None:
        line = json.dumps({"step": state.global_step, "rank": RANK, "rows": sorted(set(map(int, TAKEN.read_text().split())))})
        with (FOLDER / f"steps.{RANK}").open("a") as stream:
            stream.write(line + "\n")


class Counting(Trainer):
    def compute_loss(self, model: object, inputs: dict, *args: object, **more: object) -> object:
        with TAKEN.open("a") as stream:
            stream.write(" ".join(map(str, [*inputs["row"].tolist(), ""])))
        return super().compute_loss(model, {name: value for name, value in inputs.items() if name != "row"}, *args, **more)


class Sharded(Counting):
    """accelerate shards on accelerators only, though FSDP2 itself runs on the CPU: the processes are called GPUs while it decides."""

    def create_accelerator_and_postprocess(self) -> None:
        PartialState().distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def main() -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sharded = {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=4,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        remove_unused_columns=False,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **({} if KIND == "ddp" else sharded),
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))
    kind = Counting if KIND == "ddp" else Sharded
    trainer = kind(model=model, args=arguments, train_dataset=Samples(), data_collator=collate, callbacks=[Watched()])
    trainer.train()
    result = {
        "rank": RANK,
        "model": type(trainer.model).__name__,
        "step": trainer.state.global_step,
        "batch": arguments.per_device_train_batch_size,
        "accumulation": arguments.gradient_accumulation_steps,
        "losses": [round(row["loss"], 5) for row in trainer.state.log_history if "loss" in row],
    }
    os.write(1, f"RESULT {json.dumps(result)}\n".encode())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
