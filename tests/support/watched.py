"""Windows and runs for the monitor's tests: a healthy one each, to be made ill in one respect."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainingArguments

from hfopt.schema import GpuWindow, Phases, RunFacts, Spread, Window
from hfopt.units import GIB


def spread(value: float) -> Spread:
    return Spread(mean=value, low=value, high=value)


def card(**changed: Any) -> GpuWindow:
    """An A10-like card hard at work."""
    healthy = GpuWindow(
        uuid="GPU-0",
        sm_util=spread(0.97),
        memory_util=spread(0.45),
        used_bytes=18 * GIB,
        own_used_bytes=18 * GIB,
        total_bytes=24 * GIB,
        power_w=spread(140.0),
        power_limit_w=150.0,
        temperature_c=spread(65.0),
        sm_clock_mhz=1500.0,
        max_sm_clock_mhz=1695.0,
        pcie_rx_bytes_per_s=0.5e9,
        pcie_tx_bytes_per_s=0.1e9,
        readings=60,
    )
    return replace(healthy, **changed)


def window(*, gpu: GpuWindow | None = None, times: dict[str, float] | None = None, **changed: Any) -> Window:
    """A minute of training, 100 steps, nothing wrong."""
    shares = {"data_wait_s": 1.0, "forward_backward_s": 55.0, "optimizer_s": 3.0, "other_s": 0.5, "logging_s": 0.5, **(times or {})}
    phases = Phases(**shares)
    healthy = Window(
        first_step=2,
        last_step=101,
        steps=100,
        seconds=phases.total_s,
        phases=phases,
        logs=10,
        samples=1600.0,
        tokens=819_200.0,
        padding_share=0.05,
        fixed_length=False,
        mfu=0.42,
        gpus=(gpu or card(),),
        cpu_util=spread(0.2),
        main_thread_util=0.97,
        process_cores=1.1,
        worker_util=0.2,
        worker_count=2,
        allocated_peak_bytes=16 * GIB,
        reserved_peak_bytes=17 * GIB,
        alloc_retries=0,
        energy_j=8400.0,
    )
    return replace(healthy, **changed)


def facts(**changed: Any) -> RunFacts:
    args = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 2,
        "eval_strategy": "steps",
        "eval_steps": 100,
        "logging_strategy": "steps",
        "logging_steps": 10,
        "save_strategy": "steps",
        "save_steps": 50,
        "train_sampling_strategy": "random",
        **changed.pop("args", {}),
    }
    return RunFacts(device="cuda", cores=8.0, args=args, pcie_bytes_per_s=31.5e9, **changed)


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int = 256, length: int = 8, padding: int = 0) -> None:
        self.count, self.length, self.padding = count, length, padding

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(index, index + self.length) % 50 + 1
        mask = torch.ones(self.length, dtype=torch.long)
        if self.padding:
            mask[-self.padding :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(index % 2)}


def tiny_model(hidden: int = 16, layers: int = 1) -> Any:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * hidden, num_labels=2
    )
    return transformers.BertForSequenceClassification(config)


class SlowCollator:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        if self.seconds:  # even a sleep of nothing gives the processor away
            time.sleep(self.seconds)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def trainer(folder: Path, monitor: Any, *, kind: Any = Trainer, collator: Any = None, dataset: Any = None, **changed: Any) -> Any:
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **changed,
    }
    return kind(
        model=tiny_model(),
        args=TrainingArguments(**arguments),
        train_dataset=dataset or Sentences(),
        eval_dataset=Sentences(16),
        data_collator=collator or SlowCollator(0.0),
        callbacks=[monitor],
    )


def lines(folder: Path, kind: str | None = None, name: str = "monitor.jsonl") -> list[dict[str, Any]]:
    """The lines of a run's log."""
    found = [json.loads(line) for line in (folder / "hfopt" / name).read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]
