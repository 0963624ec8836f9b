"""`protect(trainer)`: when memory runs out, the same step again in smaller pieces, at the same effective batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hfopt.errors import HfoptError
from hfopt.facts.oom_errors import RAISED_AS
from hfopt.oom import evaluation_batches, next_settings
from hfopt.oom.guard import Guard
from hfopt.oom.micro_batch import copied_without
from hfopt.oom.step_down import Refusal
from hfopt.schema import FallbackEvent, MemoryModel


class Planned(Protocol):
    """What is needed of a plan: `hfopt.planner.Plan` has it."""

    @property
    def memory(self) -> MemoryModel | None: ...


AnyTrainer = TypeVar("AnyTrainer")
_MARK = "_hfopt_guard"
_OF_A_TRAINER = ("args", "model", "train", "get_batch_samples", "training_step", "prediction_step")


def protect(
    trainer: AnyTrainer,
    *,
    plan: Planned | None = None,
    memory: MemoryModel | None = None,
    log: next_settings.Sink | None = None,
    settings: next_settings.Settings | None = None,
    events: Callable[[FallbackEvent], None] | None = None,
    settle_after: int = 3,
    grow_after: int = 100,
) -> AnyTrainer:
    """Makes a Trainer (or any subclass of it) survive running out of memory; returns the same object.

    `plan` is what `hfopt.plan(trainer)` returned: the next size is chosen by its memory curve, or by `memory`, any other model. `log`
    takes an entry for each fallback, `settings` the settings to start from next time (by default `config_replanned.yaml` in the output
    folder), `events` each step of the fallback as it is taken. A smaller size is kept once memory ran out in `settle_after` of the last
    20 steps; after `grow_after` steps without trouble the next larger one is tried. A copy or a pickle of the Trainer is not protected.
    """
    if not all(hasattr(trainer, name) for name in _OF_A_TRAINER):
        raise HfoptError(
            f"protect takes a Trainer, not a {type(trainer).__name__}", hint="make the Trainer first: protect(Trainer(model=…, args=…))"
        )
    if plan is not None and memory is None:
        memory = plan.memory
    known = guard_of(trainer)
    if known is not None:
        if memory is not None:
            known.use_memory(memory)
        if events is not None:
            known.listen(events)
        return trainer
    wrapped: Any = trainer
    guard = Guard(wrapped, memory=memory, log=log, settings=settings, settle_after=settle_after, grow_after=grow_after)
    if events is not None:
        guard.listen(events)
    setattr(wrapped, _MARK, guard)
    wrapped.get_batch_samples = guard.get_batch_samples
    wrapped.training_step = guard.training_step
    wrapped.prediction_step = evaluation_batches.protected(wrapped, guard)
    wrapped.train = _ending_well(wrapped.train, guard)
    copied_without(wrapped, _MARK, "get_batch_samples", "training_step", "prediction_step", "train")
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
