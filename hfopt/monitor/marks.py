"""Where ranks meet: the points just before they may wait for each other, marked so that the one that comes late can be told.

They meet when they count the tokens of the batch together (after fetching it), when DDP broadcasts buffers (before forward) and inside
backward. The first is marked by standing before `Trainer._get_num_items_in_batch` (transformers 5; without it on_step_begin has to do), the
second by a hook on the wrapped model. Only used with several ranks; both are taken away when training ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hfopt.monitor.steps import StepClock

_COUNTING = "_get_num_items_in_batch"


class MeetingPoints:
    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._undo: list[Callable[[], Any]] = []

    def attach(self, trainer: Any) -> None:
        wrapped = getattr(trainer, "model_wrapped", None)
        if wrapped is not None and wrapped is not trainer.model:
            self._undo.append(wrapped.register_forward_pre_hook(self._before_forward).remove)
        if hasattr(trainer, _COUNTING) and _COUNTING not in vars(trainer):
            setattr(trainer, _COUNTING, self._marking(trainer, getattr(trainer, _COUNTING)))
            self._undo.append(lambda: vars(trainer).pop(_COUNTING, None))

    def detach(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __reduce__(self) -> tuple[Callable[[], MeetingPoints], tuple[()]]:
        """A copied model takes its hooks along; there they mark a clock nobody reads."""
        return _inert, ()

    def _before_forward(self, module: Any, args: Any) -> None:
        self._clock.mark("forward_begin")

    def _marking(self, trainer: Any, count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if trainer.model.training:  # evaluation counts too, but there nothing is fetched for a step
                self._clock.event("fetched")
                self._clock.mark("fetched")
            return count(*args, **kwargs)

        return counted


def _inert() -> MeetingPoints:
    return MeetingPoints(StepClock())
