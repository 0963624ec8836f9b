"""The model as the Trainer prepares it: attention implementation, checkpointing and training mode put in when it is built."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.compat import let_gradients_through
from hfopt.errors import TraceError
from hfopt.schema import StepSettings, Workload


def prepared(workload: Workload, settings: StepSettings) -> Callable[[], Any]:
    """A build function for the tracer."""

    def build() -> Any:
        model = workload.build_model()
        if settings.attn_implementation is not None and hasattr(model, "set_attn_implementation"):
            model.set_attn_implementation(settings.attn_implementation)
        _set_cache(model)
        _set_checkpointing(model, settings)
        if settings.fused_loss:
            from hfopt.trace.fused_loss import fuse_loss

            if not fuse_loss(model):
                raise TraceError(f"the head of {type(model).__name__} is not one that liger's fused loss can take over")
        return model.train()

    return build


def _set_cache(model: Any) -> None:
    """transformers 5: the Trainer turns the key-value cache off unless `use_cache` is asked for; before, only checkpointing does."""
    if _trainer_knows_cache() and hasattr(getattr(model, "config", None), "use_cache"):
        model.config.use_cache = False


@functools.cache
def _trainer_knows_cache() -> bool:
    """Read from the source: importing TrainingArguments brings accelerate and costs a second."""
    package = find_spec("transformers")
    assert package is not None and package.origin is not None
    source = (Path(package.origin).parent / "training_args.py").read_text(encoding="utf-8")
    return re.search(r"^    use_cache:", source, re.MULTILINE) is not None


def _set_checkpointing(model: Any, settings: StepSettings) -> None:
    checkpointing = settings.checkpointing
    if not checkpointing.on:
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise TraceError(
            f"{type(model).__name__} does not support gradient checkpointing", hint="leave gradient_checkpointing off for this model"
        )
    kwargs: dict[str, Any] = {"gradient_checkpointing_kwargs": {"use_reentrant": checkpointing.use_reentrant}}
    if checkpointing.every_n_layers > 1:
        _require_grades(checkpointing.every_n_layers)
        kwargs["every_n_layers"] = checkpointing.every_n_layers
    model.gradient_checkpointing_enable(**kwargs)
    if checkpointing.use_reentrant:
        let_gradients_through(model)


def _require_grades(every_n_layers: int) -> None:
    """The Trainer takes `every_n_layers` out of gradient_checkpointing_kwargs and hands it to the model, from transformers 5.22 on."""
    from transformers import PreTrainedModel, __version__

    if "every_n_layers" not in inspect.signature(PreTrainedModel.gradient_checkpointing_enable).parameters:
        raise TraceError(
            f"transformers {__version__} cannot checkpoint every n-th layer (n = {every_n_layers})",
            hint="remove every_n_layers from gradient_checkpointing_kwargs, or install transformers 5.22 or later",
        )
