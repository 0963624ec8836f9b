"""A Trainer's own loss, called on a copy of the Trainer that keeps its notes to itself and talks to no other rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from hfopt.model.companions import carried

_BIG_ATTRIBUTES = frozenset({"train_dataset", "eval_dataset", "model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator"})


def own_loss(trainer: Any) -> Callable[[Any, dict[str, Any]], Any] | None:
    """The trainer's loss if it is its own; the Trainer's usual one is the model's (label smoothing is a setting of the step)."""
    from transformers import Trainer

    if type(trainer).compute_loss is Trainer.compute_loss and getattr(trainer, "compute_loss_func", None) is None:
        return None
    beside = apart(trainer)

    def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
        return loss_of(beside, model, batch)

    return compute_loss


def loss_of(beside: Any, model: Any, batch: dict[str, Any], **more: Any) -> Any:
    """`compute_loss` of a trainer copy whose model, reference and loss are those of `model`."""
    beside.model = beside.model_wrapped = model
    for name, value in carried(model).items():
        setattr(beside, name, value)
    return beside.compute_loss(model, dict(batch), **more)


def apart(trainer: Any) -> Any:
    """A shallow copy whose own notes (metrics, cached columns) are not the live trainer's."""
    beside = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if (isinstance(value, (dict, list, set)) or name in ("state", "control")) and name not in _BIG_ATTRIBUTES:
            try:
                setattr(beside, name, copy.deepcopy(value))
            except (TypeError, RuntimeError):
                setattr(beside, name, copy.copy(value))
    wrapped = inspect.unwrap(vars(trainer).get("compute_loss", _nothing))
    if getattr(wrapped, "__self__", None) is trainer:  # put around the live one (a rehearsal does so), it would ask the live trainer
        beside.compute_loss = MethodType(wrapped.__func__, beside)
    if not hasattr(trainer, "current_gradient_accumulation_steps"):  # the loop sets it, and losses read it
        beside.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    if hasattr(trainer, "accelerator"):
        beside.accelerator = _Alone(trainer.accelerator)
    return beside


def _nothing() -> None: ...


class _Alone:
    """An accelerator that gathers from this rank only: the others do not plan, so an exchange would wait for them for ever."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    num_processes, process_index, local_process_index, is_main_process, is_local_main_process = 1, 0, 0, True, True

    def gather(self, tensor: Any) -> Any:
        return tensor

    def gather_for_metrics(self, data: Any, *_: Any, **__: Any) -> Any:
        return data

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def pad_across_processes(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def wait_for_everyone(self) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
