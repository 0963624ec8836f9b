"""`protect(trainer)`: when memory runs out, the same step again in smaller pieces, inside the step.

The Trainer fetches all micro-batches of an optimizer step before it runs the first (`get_batch_samples`) and runs each with
`training_step`. Both are wrapped on the trainer object. When a micro-batch fails, the error is let go (its traceback holds the tensors),
the gradients are dropped, memory is cleared, the random generators are set back to the window's start, and the window is run again from
its first micro-batch in pieces with the same `num_items_in_batch`. Nothing outside the step notices: the Trainer's counters are changed
only after `training_step` returns.

Limits: with dropout the pieces draw other masks than the whole would have. A process that cannot repeat its step (the optimizer had
begun, FSDP, ZeRO, an exchange of gradients had begun) says so and ends; `hfopt run` restarts it from its last checkpoint.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from hfopt.facts.oom_errors import RAISED_AS
from hfopt.oom import evaluation, record
from hfopt.oom.guard import Guard
from hfopt.oom.replan import Refusal
from hfopt.schema import MemoryModel

AnyTrainer = TypeVar("AnyTrainer")
_MARK = "_hfopt_guard"


def protect(
    trainer: AnyTrainer,
    *,
    memory: MemoryModel | None = None,
    log: record.Sink | None = None,
    settings: record.Settings | None = None,
    settle_after: int = 3,
    grow_after: int = 100,
) -> AnyTrainer:
    """Makes a Trainer (or any subclass of it) survive running out of memory; returns the same object.

    `memory` is a plan's memory model, by which the next size is chosen. `log` takes an entry for each fallback, `settings` the settings
    to start from next time (by default `config_replanned.yaml` in the output folder). A smaller size is kept once memory ran out in
    `settle_after` of the last 20 steps; after `grow_after` steps without trouble the next larger one is tried.
    """
    if guard_of(trainer) is not None:
        return trainer
    wrapped: Any = trainer
    guard = Guard(wrapped, memory=memory, log=log, settings=settings, settle_after=settle_after, grow_after=grow_after)
    setattr(wrapped, _MARK, guard)
    wrapped.get_batch_samples = guard.get_batch_samples
    wrapped.training_step = guard.training_step
    wrapped.prediction_step = evaluation.protected(wrapped, guard)
    wrapped.train = _ending_well(wrapped.train, guard)
    return trainer


def guard_of(trainer: Any) -> Guard | None:
    guard: Guard | None = vars(trainer).get(_MARK)
    return guard


def refusal(trainer: Any) -> Refusal | None:
    """Why the last micro-batch that failed could not be run in pieces, when it could not."""
    guard = guard_of(trainer)
    return guard.refusal if guard is not None else None


def _ending_well(train: Any, guard: Guard) -> Any:
    """An OOM outside a step (in the optimizer, in a callback, while saving) is left to the supervisor; the error stays the user's own."""

    @functools.wraps(train)
    def protected_train(*args: Any, **more: Any) -> Any:
        try:
            return train(*args, **more)
        except RAISED_AS as error:
            guard.on_escape(error)
            raise

    return protected_train
