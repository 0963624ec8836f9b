"""Whole HF Trainer runs on the virtual GPU: reads cases as JSON lines on stdin, prints what torch.cuda counted for each.

Started by virtual_accuracy.py in an environment that sees the virtual card. Peaks are those of PyTorch's own allocator.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from typing import Any

import torch
from cases import Case, trained_workload
from transformers import Trainer, TrainingArguments


class _Dataset(torch.utils.data.Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def run(case: Case, history: str | None = None) -> dict[str, Any]:
    workload = trained_workload(case)
    model = workload.build_model()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=case.batch,
        gradient_accumulation_steps=case.accumulation,
        max_steps=case.steps,
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": case.reentrant} if case.checkpointing else None,
        optim=case.optim,
        max_grad_norm=case.max_grad_norm,
        label_smoothing_factor=case.label_smoothing,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )

    class Run(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            if workload.compute_loss is None:
                return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)
            return workload.compute_loss(model, inputs)

    if history:
        torch.cuda.memory._record_memory_history(max_entries=10_000_000, stacks="python")
    trainer = Run(
        model=model,
        args=arguments,
        train_dataset=_Dataset(case.batch * case.accumulation * case.steps),
        data_collator=lambda samples: workload.make_batch(len(samples)),
    )
    trainer.train()
    if history:
        torch.cuda.memory._dump_snapshot(history)
        torch.cuda.memory._record_memory_history(enabled=None)
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the Trainer prints
    for line in sys.stdin:
        case = Case(**json.loads(line))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            answer = run(case, os.environ.get("HFOPT_HISTORY"))
        except torch.OutOfMemoryError as error:
            answer = {"failed": f"out of memory: {error}"[:200]}
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # the virtual card cannot run it
            answer = {"failed": f"{type(error).__name__}: {error}"[:200]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
