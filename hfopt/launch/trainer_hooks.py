"""What `hfopt run` does inside the user's process: every Trainer is planned for, protected, and resumed with new settings after a restart.

The script is unchanged. The new pair of batch and accumulation is set on the TrainingArguments before the Trainer reads them, and only
for the output folder whose run failed, so that another Trainer of the same script keeps its own. Before transformers 5.2 a checkpoint's
`train_batch_size` silently replaces the one asked for (transformers#43708): there the state that is read back is given the new one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hfopt.launch.handoff import RunOptions
from hfopt.oom import record
from hfopt.oom.protect import guard_of, protect

ORDERS = "HFOPT_ORDERS"
"""JSON in the environment of a restarted process: output_dir, checkpoint (or null), changes."""


def install(trainer_class: type) -> None:
    """Wraps the class itself, once: subclasses call its __init__ and train."""
    kind: Any = trainer_class
    original_init, original_train = kind.__init__, kind.train
    options = RunOptions.here()

    @functools.wraps(original_init)
    def init(self: Any, *args: Any, **more: Any) -> None:
        asked = _obey(args[1] if len(args) > 1 else more.get("args"))
        original_init(self, *args, **more)
        if options.fallback:
            guard = guard_of(protect(self))
            assert guard is not None
            guard.scripts_accumulation = asked

    @functools.wraps(original_train)
    def train(self: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **more: Any) -> Any:
        if options.prepare is not None and options.plan:
            _harmlessly(options.prepare, self, searching=trial is not None)
        record.say_alive(self.args)
        checkpoint = _checkpoint_for(self.args)
        if checkpoint is None:
            return original_train(self, resume_from_checkpoint, trial, *args, **more)
        with_own_batch = _reading_back(self.args.train_batch_size)
        return with_own_batch(lambda: original_train(self, checkpoint, trial, *args, **more))

    kind.__init__, kind.train = init, train


def _harmlessly(name: str, trainer: Any, *, searching: bool) -> None:
    """A fault of ours never stops training: one line, and the script runs as it was. An exit that was asked for goes through."""
    module, _, function = name.partition(":")
    try:
        getattr(import_module(module), function)(trainer, searching=searching)
    except Exception as error:  # noqa: BLE001 - whatever breaks in the planning, the training it is for must go on
        why = " ".join(str(error).split()) or "no further word"
        record.tell(f"hfopt: not planned ({type(error).__name__}: {why}); the script trains with its own settings")


def orders_for(output_dir: str) -> dict[str, Any] | None:
    text = os.environ.get(ORDERS)
    orders: dict[str, Any] | None = json.loads(text) if text else None
    if orders is None or Path(orders["output_dir"]).resolve() != Path(output_dir).resolve():
        return None
    return orders


def _obey(args: Any) -> int | None:
    """Sets what was ordered; the accumulation the script asked for, where it is another one now."""
    orders = orders_for(args.output_dir) if args is not None else None
    if orders is None:
        return None
    asked: int = args.gradient_accumulation_steps
    for key, value in orders["changes"].items():
        setattr(args, key, value)
    return asked if asked != args.gradient_accumulation_steps else None


def _checkpoint_for(args: Any) -> str | None:
    orders = orders_for(args.output_dir)
    return orders["checkpoint"] if orders is not None else None


def _reading_back(batch: int) -> Callable[[Callable[[], Any]], Any]:
    """Runs an action during which a checkpoint's state says `batch` where it says another one."""
    import transformers
    from packaging.version import Version

    def run(action: Callable[[], Any]) -> Any:
        if Version(transformers.__version__) >= Version("5.2"):
            return action()
        from transformers.trainer_callback import TrainerState

        original = TrainerState.load_from_json

        def load_from_json(path: str) -> Any:
            state = original(path)
            state.train_batch_size = batch
            return state

        TrainerState.load_from_json = load_from_json
        try:
            return action()
        finally:
            TrainerState.load_from_json = original

    return run
