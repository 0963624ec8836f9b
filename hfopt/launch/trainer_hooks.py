"""What `hfopt run` does inside the user's process: every Trainer is planned for, protected, and resumed with new settings after a restart.

The script is unchanged. The new pair of batch and accumulation is set on the TrainingArguments before the Trainer reads them, and only
for the output folder whose run failed, so that another Trainer of the same script keeps its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfopt.compat.transformers_patches import checkpoint_batch
from hfopt.facts.training_keys import both_spellings
from hfopt.launch.handoff import Handoff, RestartOrders, RunOptions, RunStart
from hfopt.launch.heartbeat import Heart, callback
from hfopt.oom import record
from hfopt.oom.protect import guard_of, protect

_hearts: list[Heart] = []


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
        if options.plan:
            _planned_harmlessly(self, searching=trial is not None)
        _supervised(self)
        orders = RestartOrders.here(self.args.output_dir)
        with _signs_of_life(self, options.hang_after_s):
            if orders is None or orders.checkpoint is None:
                return original_train(self, resume_from_checkpoint, trial, *args, **more)
            with checkpoint_batch(self.args.train_batch_size):
                return original_train(self, orders.checkpoint, trial, *args, **more)

    kind.__init__, kind.train = init, train


def _planned_harmlessly(trainer: Any, *, searching: bool) -> None:
    """A fault of ours never stops training: one line, and the script runs as it was. An exit that was asked for goes through."""
    try:
        from hfopt.launch.attach import prepare

        prepare(trainer, searching=searching)
    except Exception as error:  # noqa: BLE001 - whatever breaks in the planning, the training it is for must go on
        why = " ".join(str(error).split()) or "no further word"
        record.tell(f"hfopt: not planned ({type(error).__name__}: {why}); the script trains with its own settings")


def _supervised(trainer: Any) -> None:
    """From here on the supervisor can start the run again, whoever protected the Trainer."""
    handoff, guard = Handoff.here(), guard_of(trainer)
    if handoff is not None:
        handoff.started(RunStart.of(trainer.args))
        if guard is not None:
            guard.supervised_by(handoff)


@contextmanager
def _signs_of_life(trainer: Any, after_s: float) -> Iterator[None]:
    """While the Trainer trains; a Trainer inside another one's callback is left to that one."""
    handoff = Handoff.here()
    if handoff is None or after_s <= 0 or _hearts:
        yield
        return
    heart = Heart(handoff.path.parent, rank=trainer.args.process_index, after_s=after_s)
    signs = callback(heart)
    trainer.add_callback(signs)
    _hearts.append(heart)
    try:
        yield
    finally:
        _hearts.remove(heart)
        trainer.remove_callback(signs)
        heart.stop()


def _obey(args: Any) -> int | None:
    """Sets what was ordered; the accumulation the script asked for, where it is another one now."""
    orders = RestartOrders.here(args.output_dir) if args is not None else None
    if orders is None:
        return None
    asked: int = args.gradient_accumulation_steps
    for key, value in both_spellings(orders.changes, args).items():
        setattr(args, key, value)
    return asked if asked != args.gradient_accumulation_steps else None
