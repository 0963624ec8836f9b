"""The same OOM, three ways: undisturbed, under hfopt.protect, under the Trainer's own auto_find_batch_size.

A small Llama trains on the CPU in float64 with batch 16 × accumulation 4 for 20 steps; in step 7 memory "runs out" (an OutOfMemoryError
is raised in the third micro-batch) for any piece of more than 14 samples, and never again. Counted: the global steps the run fell back by,
the effective batch afterwards, samples that went into optimizer steps, the final loss and weights
against the undisturbed run, and the time. All of it rests on the CPU and an injected error; tests/oom/test_shortage.py has real ones.

usage: python benchmarks/oom_recovery.py        the last line is JSON
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hfopt

STEPS, BATCH, ACCUMULATION = 20, 16, 4
FAILS_AT, FITS = 7, 14  # 14 is what auto_find_batch_size tries next, so it need shrink only once


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    optimizer_steps_taken: int  # 20 in an undisturbed run
    steps_lost: int  # global steps the run fell back by
    effective_batch_after: int
    sample_visits: int  # in steps that reached the optimizer
    final_loss: float
    weights_difference: float  # relative to the undisturbed run
    seconds: float


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return STEPS * BATCH * ACCUMULATION

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, 256, (16,), generator=torch.Generator().manual_seed(i))
        labels = ids.clone()
        labels[2 + i % 14 :] = -100
        return {"input_ids": ids, "labels": labels}


class Watch(TrainerCallback):  # type: ignore[misc]
    """Where the run is after each step, and what went into it."""

    __module__ = "torch"  # an instrument: what it counts is nothing that a script keeps

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.visits = 0
        self.in_step = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)
        self.visits += self.in_step
        self.in_step = 0


class Shortage:
    """Too little memory in the third micro-batch of one step, once the size fits never again."""

    __module__ = "torch"  # an instrument: what it counts is nothing that a script keeps

    def __init__(self, trainer: Any, watch: Watch) -> None:
        self.trainer, self.watch, self.over = trainer, watch, False
        self.place = (-1, 0)
        trainer.model.model.layers[0].register_forward_hook(self.hook)

    def hook(self, module: Any, args: Any, output: Any) -> None:
        hidden = output if torch.is_tensor(output) else output[0]
        if not hidden.requires_grad or self.over:
            return
        step = self.trainer.state.global_step
        self.place = (step, self.place[1] + 1 if self.place[0] == step else 1)
        if step == FAILS_AT and self.place[1] >= 3:
            if hidden.shape[0] > FITS:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            self.over = True


def run(kind: str, *, fails: bool) -> tuple[Outcome, torch.Tensor]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            num_train_epochs=1,
            learning_rate=1e-3,
            warmup_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            auto_find_batch_size=kind == "auto_find_batch_size",
        )
        trainer = Trainer(model=LlamaForCausalLM(config).double(), args=args, train_dataset=Samples(), callbacks=[watch])
        taken = trainer.training_step

        def counting(model: Any, inputs: Any, *more: Any) -> Any:
            rows = len(inputs["input_ids"])
            loss = taken(model, inputs, *more)
            watch.in_step += rows
            return loss

        trainer.training_step = counting
        if fails:
            Shortage(trainer, watch)
        if kind == "hfopt.protect":
            trainer = hfopt.protect(trainer)
            # count a micro-batch once, however many pieces it was run in
            protected = trainer.training_step

            def once(model: Any, inputs: Any, *more: Any) -> Any:
                before, rows = watch.in_step, len(inputs["input_ids"])
                loss = protected(model, inputs, *more)
                watch.in_step = before + rows
                return loss

            trainer.training_step = once
        began = time.perf_counter()
        result = trainer.train()
        seconds = time.perf_counter() - began
        lost = max((high - low for high, low in zip(watch.steps, watch.steps[1:], strict=False) if low <= high), default=-1) + 1
        outcome = Outcome(
            optimizer_steps_taken=len(watch.steps),
            steps_lost=lost,
            effective_batch_after=trainer._train_batch_size * ACCUMULATION,
            sample_visits=watch.visits,
            final_loss=[row["loss"] for row in trainer.state.log_history if "loss" in row][-1] if result else 0.0,
            weights_difference=0.0,
            seconds=seconds,
        )
        return outcome, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def main() -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    run("warm-up", fails=False)
    plain, expected = run("undisturbed", fails=False)
    rows: dict[str, dict[str, Any]] = {"undisturbed": asdict(plain)}
    for kind in ("hfopt.protect", "auto_find_batch_size"):
        outcome, weights = run(kind, fails=True)
        rows[kind] = asdict(outcome) | {"weights_difference": float((weights - expected).norm() / expected.norm())}
        rows[kind]["loss_difference"] = abs(outcome.final_loss - plain.final_loss)
    names = list(rows)
    print("\n" + " " * 26 + "".join(f"{name:>24}" for name in names))
    for key in rows["hfopt.protect"]:
        print(f"{key:26}" + "".join(f"{rows[name].get(key, 0.0):>24.6g}" for name in names))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
