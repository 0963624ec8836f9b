"""One rank of a data-parallel run with shortages on chosen ranks; a program, started by test_fallback_ddp.py. Prints what it saw as JSON.

Arguments: a schedule {"step,micro": [[rank, phase, most samples], ...]} as JSON, the folder for the output, the accumulation, ddp or fsdp.
Phases: forward, backward, inputs (before the model is called).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfopt
from hfopt.schema import FallbackEvent

SHARDED = sys.argv[4:] == ["fsdp"]
RANK = int(os.environ["RANK"])


class Failures(list[str]):
    """Not on the trainer: what it counts is set back with the step."""

    __module__ = "torch"  # an instrument: what it counts is nothing that a script keeps


FAILURES = Failures()
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[2 + i % 10 :] = -100
        return {"input_ids": ids, "labels": labels}


class Short(Trainer):
    """Runs out of memory as the schedule says; the wrapped object is told where it is by its guard."""

    schedule: dict[str, Any] = {}  # noqa: RUF012
    micro_batch = 0

    def at(self, event: FallbackEvent) -> None:
        self.micro_batch = event.micro_batch

    def shortage(self, phases: set[str], rows: int) -> str | None:
        place = f"{self.state.global_step},{self.micro_batch}"
        for rank, phase, most in self.schedule.get(place, ()):
            if rank == RANK and phase in phases and rows > most:
                FAILURES.append(f"{place} {phase} {rows}")
                return str(phase)
        return None

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        if torch.is_grad_enabled() and self.shortage({"inputs"}, len(inputs["input_ids"])):
            out_of_memory()
        return super().compute_loss(model, inputs, *args, **more)


class Sharded(Short):
    """accelerate shards on accelerators only, though FSDP2 itself runs on the CPU: the processes are called GPUs while it decides."""

    def create_accelerator_and_postprocess(self) -> None:
        PartialState().distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()


def run(schedule: dict[str, Any], folder: Path, accumulation: int) -> Short:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).double()
    if not SHARDED:
        model.register_buffer("counter", torch.zeros(1, dtype=torch.float64))  # DDP sends buffers around in its forward
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
        max_steps=5,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_timeout=60,
        include_num_input_tokens_seen=True,
        **({"fsdp": True, "fsdp_config": {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}} if SHARDED else {}),
    )
    trainer = (Sharded if SHARDED else Short)(model=model, args=args, train_dataset=Samples())
    trainer.schedule = schedule
    if schedule:
        hfopt.protect(trainer, settle_after=99, events=trainer.at)

    def hook(module: Any, inputs: Any, output: Any) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        phase = trainer.shortage({"forward", "backward"}, hidden.shape[0]) if hidden.requires_grad else None
        if phase == "forward":
            out_of_memory()
        if phase == "backward":
            hidden.register_hook(out_of_memory)

    model.model.layers[0].register_forward_hook(hook)

    trainer.train()
    return trainer


def whole(parameter: Any) -> torch.Tensor:
    return parameter.full_tensor() if SHARDED else parameter


def main() -> None:
    schedule, folder, accumulation = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    plain = run({}, folder / "plain", accumulation)
    short = run(schedule, folder / "short", accumulation)
    result = {"rank": RANK, "failures": FAILURES, "step": short.state.global_step, "tokens": short.state.num_input_tokens_seen}
    weights, expected = (torch.cat([whole(p.detach()).flatten() for p in one.model.parameters()]) for one in (short, plain))
    result["difference"] = float((weights - expected).norm() / expected.norm())
    result["plain_tokens"] = plain.state.num_input_tokens_seen
    losses = [[row["loss"] for row in t.state.log_history if "loss" in row] for t in (short, plain)]
    result["loss_difference"] = max(abs(a - b) for a, b in zip(*losses, strict=True))
    print("RESULT", json.dumps(result), flush=True)


main()
