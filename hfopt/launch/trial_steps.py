"""`hfopt run --dry-run`: a few real steps of the planned run on its own device, what they took, and an end before anything is saved."""

from __future__ import annotations

import sys
import time
from typing import Any

from hfopt.oom import record
from hfopt.oom.device_memory import read
from hfopt.units import format_bytes, format_seconds

STEPS = 3
_QUIET = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "logging_strategy": "no",
    "push_to_hub": False,
    "save_strategy": "no",
}


def arrange(trainer: Any) -> None:
    """The Trainer's next `train()` stops after a few steps and ends the process."""
    from transformers.trainer_utils import IntervalStrategy, SaveStrategy

    words = {"eval_strategy": IntervalStrategy.NO, "logging_strategy": IntervalStrategy.NO, "save_strategy": SaveStrategy.NO}
    args = trainer.args
    for name, value in _QUIET.items():
        if hasattr(args, name):
            setattr(args, name, words.get(name, value))
    args.max_steps = STEPS
    trainer.add_callback(_callback(trainer))


def _callback(trainer: Any) -> Any:
    from transformers import TrainerCallback

    class EndAfterSteps(TrainerCallback):  # type: ignore[misc]
        """The first step opens files and makes the optimizer's state: its time does not count."""

        began: float | None = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.began is None:
                self.began = time.perf_counter()
                self.first = state.global_step
                return
            if state.global_step < STEPS:
                return
            step_s = (time.perf_counter() - self.began) / max(1, state.global_step - self.first)
            if state.is_world_process_zero:
                record.tell(f"hfopt: dry run: {state.global_step} steps, {format_seconds(step_s)} each{_peak(args)}; nothing was saved")
            sys.exit(0)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.is_world_process_zero:
                record.tell(f"hfopt: dry run: the data ended after {state.global_step} steps{_peak(args)}; nothing was saved")
            sys.exit(0)

    return EndAfterSteps()


def _peak(args: Any) -> str:
    import torch

    if args.device.type != "cuda":
        return ""
    reserved, now = torch.cuda.max_memory_reserved(args.device), read(args.device)
    room = f" of {format_bytes(now.capacity_bytes)}" if now.capacity_bytes is not None else ""
    return f", at most {format_bytes(reserved)} reserved{room} (measured)"
