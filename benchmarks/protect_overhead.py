"""What protection costs a step that never fails: the CPU time spent in hfopt's own code, over that of the steps.

A small Llama trains on the CPU under hfopt.protect. Every call into the wrapped methods is timed, and so is every call they pass on to the
Trainer; the difference is what protection adds: copies of the window's dicts, the random generators' state, the bookkeeping. It is counted
in CPU time and this way because on a shared machine two runs side by side differ by more than the half percent in question; their ratio
is printed too, as the median over interleaved rounds. A step on a GPU takes longer than this one, so the share there is smaller.

usage: python benchmarks/protect_overhead.py [--steps 60] [--rounds 5]        the last line is JSON; exit code 1 when over 0.5 %
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hfopt

LIMIT = 0.005


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.full((64,), i % 250 + 3)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **more)
            finally:
                self.seconds += time.thread_time() - began

        return timed


class StepTimes(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **more: Any) -> None:
        self.ends.append(time.process_time())

    @property
    def median_s(self) -> float:
        return median(after - before for before, after in zip(self.ends, self.ends[1:], strict=False))


def trainer(steps: int, accumulation: int, folder: str) -> tuple[Trainer, StepTimes]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4
    )
    times = StepTimes()
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=Samples(), callbacks=[times]), times


def share(steps: int, accumulation: int) -> tuple[float, float]:
    """Seconds added per step, and seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        made, times = trainer(steps, accumulation, folder)
        inner, outer = Stopwatch(), Stopwatch()
        made.training_step = inner.timed(made.training_step)
        made.get_batch_samples = inner.timed(made.get_batch_samples)
        hfopt.protect(made)
        made.training_step = outer.timed(made.training_step)
        made.get_batch_samples = outer.timed(made.get_batch_samples)
        made.train()
        return (outer.seconds - inner.seconds) / steps, times.median_s


def ratio(steps: int, rounds: int) -> float:
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            plain, plain_times = trainer(steps, 1, folder)
            plain.train()
            protected, protected_times = trainer(steps, 1, folder)
            hfopt.protect(protected).train()
            ratios.append(protected_times.median_s / plain_times.median_s)
    return median(ratios)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    share(5, 1)
    results: dict[str, float] = {}
    for accumulation in (1, 8):
        added_s, step_s = share(chosen.steps, accumulation)
        results[f"share_accumulation_{accumulation}"] = added_s / step_s
        print(
            f"accumulation {accumulation}: {added_s * 1e6:.0f} µs added to a step of {step_s * 1e3:.1f} ms: {100 * added_s / step_s:.3f} %"
        )
    results["interleaved_ratio"] = ratio(chosen.steps, chosen.rounds)
    print(f"protected over plain, {chosen.rounds} interleaved rounds: {results['interleaved_ratio']:.4f}")
    print(json.dumps(results))
    sys.exit(int(max(results["share_accumulation_1"], results["share_accumulation_8"]) > LIMIT))


if __name__ == "__main__":
    main()
