"""A user's training script, as `hfopt run` is given it: knows nothing of hfopt. Started by test_launch.py.

Arguments: the output folder, what goes wrong (none, optimizer, exchange, bug, hopeless, killed), and perhaps a YAML that it does not read.
What goes wrong does so once: a marker in the folder says that it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
FOLDER, TROUBLE = Path(sys.argv[1]), sys.argv[2]
RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 64, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def fail_in_backward(module: Any, inputs: Any, output: Any) -> None:
    hidden = output if torch.is_tensor(output) else output[0]
    if hidden.requires_grad:
        hidden.register_hook(out_of_memory)


class Trouble(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        marker = FOLDER / "happened"
        if state.global_step != 3 or (marker.exists() and TROUBLE != "hopeless") or RANK != WORLD - 1:
            return
        if TROUBLE in ("optimizer", "hopeless"):
            marker.touch()
            out_of_memory()
        if TROUBLE == "bug":
            sys.exit(7)
        if TROUBLE == "killed":
            marker.touch()
            (FOLDER / "kills").write_text("1")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Hooks the first parameter to be exchanged, so that memory runs out while the ranks exchange gradients."""
        marker = FOLDER / "happened"
        if TROUBLE == "exchange" and state.global_step == 3 and RANK == 1 and not marker.exists():
            marker.touch()
            model.model.layers[0].register_forward_hook(fail_in_backward)


torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
arguments = TrainingArguments(
    output_dir=str(FOLDER / "out"),
    per_device_train_batch_size=8 // WORLD,
    gradient_accumulation_steps=1 if TROUBLE == "exchange" else 2,
    max_steps=5,
    save_strategy="steps",
    save_steps=2,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    ddp_backend="gloo" if WORLD > 1 else None,
)
trainer = Trainer(model=LlamaForCausalLM(config).double(), args=arguments, train_dataset=Samples(), callbacks=[Trouble()])
trainer.train()
result = {
    "rank": RANK,
    "step": trainer.state.global_step,
    "batch": trainer.args.per_device_train_batch_size,
    "used_batch": trainer._train_batch_size,
    "accumulation": trainer.args.gradient_accumulation_steps,
    "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
    "weights": float(sum(p.detach().abs().sum() for p in trainer.model.parameters())),
}
os.write(1, f"RESULT {json.dumps(result)}\n".encode())  # one write: two ranks' lines are not mixed
if WORLD > 1:
    torch.distributed.destroy_process_group()
