"""Memory really runs out here (the process may not take more), and the run goes on in the same step.

The same script without hfopt ends with `RuntimeError: ... can't allocate memory`: try `--unprotected`.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hfopt

ROOM_BYTES = 96 << 20  # a micro-batch of 64 needs about 300 MiB


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.randint(3, 4000, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def build(folder: Path) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2
    )
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=64,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,  # the limit below is one on the host's memory
        disable_tqdm=True,
    )
    return Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Texts())


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    protected = "--unprotected" not in sys.argv
    folder = Path(next((word for word in sys.argv[1:] if not word.startswith("-")), "runs/survive_oom"))
    torch.set_num_threads(1)  # each thread keeps memory of its own
    roomy = build(folder / "roomy")
    roomy.train()

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM_BYTES, resource.RLIM_INFINITY))
    tight = build(folder / "tight")
    if protected:
        hfopt.protect(tight)
    tight.train()
    print("losses with room:   ", [round(loss, 4) for loss in losses(roomy)])
    print("losses without room:", [round(loss, 4) for loss in losses(tight)])
    print((folder / "tight" / "config_replanned.yaml").read_text())


main()
