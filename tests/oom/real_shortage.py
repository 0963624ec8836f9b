"""A training that really does not fit, on a small (virtual) card or in a limited address space; started by test_shortage.py.

Arguments: cuda or cpu, and the folder for the output. Prints what it saw as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hfopt

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
ON_CPU, FOLDER = sys.argv[1] == "cpu", Path(sys.argv[2])
BATCH, LENGTH = (64, 64) if ON_CPU else (32, 256)
ROOM_BYTES = 96 << 20  # for a step; a whole micro-batch needs about 300 MiB on the CPU


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 4000, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


class Level(TrainerCallback):
    """Allocated bytes as each step begins and ends."""

    def __init__(self) -> None:
        self.begin: list[int] = []
        self.end: list[int] = []

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        self.begin.append(0 if ON_CPU else torch.cuda.memory_allocated())

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.end.append(0 if ON_CPU else torch.cuda.memory_allocated())


def trainer(entries: list[Any] | None) -> tuple[Trainer, Level]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    level = Level()
    args = TrainingArguments(
        output_dir=str(FOLDER),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=ON_CPU,
        tf32=not ON_CPU or None,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    made = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Samples(), callbacks=[level])
    return (made if entries is None else hfopt.protect(made, log=entries.append)), level


def main() -> None:
    expected = None
    if ON_CPU:
        torch.set_num_threads(1)
        plain, _ = trainer(None)
        plain.train()
        expected = torch.cat([p.detach().flatten() for p in plain.model.parameters()])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    entries: list[Any] = []
    protected, level = trainer(entries)
    protected.train()
    weights = torch.cat([p.detach().flatten() for p in protected.model.parameters()])
    result = {
        "step": protected.state.global_step,
        "seen": [entry["seen"] for entry in entries],
        "sizes": [entry["step"]["candidate"]["per_device_batch"] for entry in entries],
        "actions": [entry["step"]["action"] for entry in entries],
        "begin": level.begin,
        "end": level.end,
        "difference": float((weights - expected).norm() / expected.norm()) if expected is not None else None,
    }
    print("RESULT", json.dumps(result), flush=True)


main()
