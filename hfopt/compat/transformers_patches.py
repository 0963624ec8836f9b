"""What differs between versions of transformers and accelerate, or is reached by a private name."""

from __future__ import annotations

import inspect
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from hfopt.compat.versions import installed_torch, is_at_least, training_arguments_source

_MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"  # where transformers before 5 leaves the precision for accelerate


@contextmanager
def quietly() -> Iterator[None]:
    """Without a model's own remarks: log lines and Python warnings that the user will see when it trains, or cannot act on."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def sdpa_stands_in(model_class: type) -> Iterator[None]:
    """Within this a model may be built with sdpa though its own code lacks it (softcapping, sinks): for a flash kernel, which has both and
    takes the memory that PyTorch's own flash kernel takes."""
    from transformers import PreTrainedModel

    family = [one for one in model_class.__mro__ if issubclass(one, PreTrainedModel) and one is not PreTrainedModel]
    base: Any = family[-1] if family else None
    if base is None or getattr(base, "_supports_sdpa", True):
        yield
        return
    was = base._supports_sdpa
    base._supports_sdpa = True
    try:
        yield
    finally:
        base._supports_sdpa = was


@contextmanager
def masks_read() -> Iterator[None]:
    """transformers 5 takes every fake tensor for a graph being traced, and then keeps a mask that hides nothing: flash attention is lost.
    A trace's masks have values, so within this they are asked as in a real step."""
    helpers = sys.modules.get("transformers.utils.import_utils")
    original = getattr(helpers, "is_fake_tensor", None)
    if original is None:
        yield
        return
    setattr(helpers, "is_fake_tensor", lambda tensor: False)  # noqa: B010 - a module's private name
    try:
        yield
    finally:
        setattr(helpers, "is_fake_tensor", original)  # noqa: B010


def let_gradients_through(model: Any) -> None:
    """Reentrant checkpointing gives no gradient to a block whose input has none, as over the frozen embeddings of a model with adapters.

    What a run must do itself where its transformers (before 5) does not: the embeddings' output asks for a gradient.
    """
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # a model of sounds has none, and transformers says so
        return
    if embeddings is not None and not any(parameter.requires_grad for parameter in embeddings.parameters()):
        model.enable_input_require_grads()


@cache
def default_optim() -> str:
    """transformers decides it while its class is made: fused AdamW where it knows torch 2.8 and finds it."""
    knows = re.search(r'^\s*default_optim = "adamw_torch_fused"$', training_arguments_source(), re.MULTILINE) is not None
    return "adamw_torch_fused" if knows and installed_torch() >= (2, 8) else "adamw_torch"


@cache
def trainer_turns_cache_off() -> bool:
    """transformers 5: the Trainer turns the key-value cache off unless `use_cache` is asked for; before, only checkpointing does."""
    return re.search(r"^    use_cache:", training_arguments_source(), re.MULTILINE) is not None


def checkpoints_every_n_layers() -> bool:
    """The Trainer takes `every_n_layers` out of gradient_checkpointing_kwargs and hands it to the model, from transformers 5.22 on."""
    from transformers import PreTrainedModel

    enable = getattr(PreTrainedModel, "activation_checkpointing_enable", PreTrainedModel.gradient_checkpointing_enable)
    return "every_n_layers" in inspect.signature(enable).parameters


def enable_checkpointing(model: Any, options: Mapping[str, Any], **graded: int) -> None:
    """By the name of transformers 5.23 where the model has it: the old one warns there."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=dict(options), **graded)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(options), **graded)


def disable_checkpointing(model: Any) -> None:
    name = "activation_checkpointing_disable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_disable")()


def is_checkpointing(model: Any) -> bool | None:
    """None: a model that knows nothing of it."""
    found = getattr(model, "is_activation_checkpointing", None)
    if found is None:
        found = getattr(model, "is_gradient_checkpointing", None)
    return None if found is None else bool(found)


@contextmanager
def checkpoint_batch(batch: int) -> Iterator[None]:
    """A checkpoint that is read in here says `batch` where it says another one.

    Before transformers 5.2 its `train_batch_size` silently replaces the one asked for (transformers#43708).
    """
    if is_at_least("transformers", "5.2"):
        yield
        return
    from transformers.trainer_callback import TrainerState

    original = TrainerState.load_from_json

    def load_from_json(path: str) -> Any:
        state = original(path)
        state.train_batch_size = batch
        return state

    TrainerState.load_from_json = load_from_json
    try:
        yield
    finally:
        TrainerState.load_from_json = original


def launchers_precision() -> str:
    """The precision that `accelerate config` or a Trainer before transformers 5 left in the environment; 'no' where none did."""
    return os.environ.get(_MIXED_PRECISION, "no")


def renew_accelerator(trainer: Any) -> None:
    """The accelerator's state is shared by the process and refuses another precision, so it is made anew, the way the Trainer made it."""
    from accelerate.state import AcceleratorState

    args = trainer.args
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    if hasattr(args, "mixed_precision"):
        args.mixed_precision = precision
    else:
        os.environ[_MIXED_PRECISION] = precision
    AcceleratorState._reset_state()
    trainer.create_accelerator_and_postprocess()


@contextmanager
def accelerate_state_kept() -> Iterator[None]:
    """accelerate's shared state, which every Trainer writes to, is as it was afterwards."""
    from accelerate import state

    shared = [kind._shared_state for kind in (state.PartialState, state.AcceleratorState, state.GradientState)]
    before = [dict(kept) for kept in shared]
    try:
        yield
    finally:
        for kept, old in zip(shared, before, strict=True):
            kept.clear()
            kept.update(old)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A Trainer made and run in here leaves no trace in its process: seeds, environment, verbosity and accelerate's state are put back.

    The caller may be in the middle of a training script of their own.
    """
    import numpy
    import torch

    environment = dict(os.environ)
    seeds = random.getstate(), numpy.random.get_state()
    try:
        with quietly(), accelerate_state_kept(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(seeds[0])
        numpy.random.set_state(seeds[1])
        os.environ.clear()
        os.environ.update(environment)


_ASSIGNMENT = "linear_sum_assignment"


@contextmanager
def assignments_by_shape() -> Iterator[None]:
    """DETR and its kin leave PyTorch to match predictions with boxes (scipy). Of fake tensors the answer is any matching: which prediction
    goes with which box changes no size, only how many pairs there are, and that is the smaller side of the matrix."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    patched = [(module, vars(module)[_ASSIGNMENT]) for module in modules if _ASSIGNMENT in getattr(module, "__dict__", {})]
    for module, original in patched:
        setattr(module, _ASSIGNMENT, _matching_by_shape(original))
    try:
        yield
    finally:
        for module, original in patched:
            setattr(module, _ASSIGNMENT, original)


def _matching_by_shape(original: Any) -> Any:
    def assignment(cost: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensor

        if not isinstance(cost, FakeTensor):
            return original(cost, *args, **kwargs)
        import numpy as np

        pairs = np.arange(min(cost.shape))
        return pairs, pairs

    return assignment
