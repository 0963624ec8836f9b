"""The gradients of one optimizer step by the real Trainer, whole and in micro-batches, compared.

The Trainer sets seeds, environment variables and accelerate's global state; all of it is put back, because the caller may be in the
middle of a training script of their own.
"""

from __future__ import annotations

import os
import random
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers

from hfopt.model.batch import with_decoder_inputs
from hfopt.schema import Workload

_SEED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientRatio:
    norm_ratio: float  # in micro-batches over whole
    difference: float  # norm of the difference over the norm of the whole


def gradient_ratio(
    workload: Workload, *, samples: int, split: int, arguments: Mapping[str, Any], divide: bool = False
) -> GradientRatio | None:
    """`samples` × 1 against (samples / split) × split. divide: with model_accepts_loss_kwargs = False. None: no gradient to compare."""
    with undisturbed():
        torch.manual_seed(_SEED)
        model = workload.build_model()
        batch = {name: _varied(name, tensor, getattr(model, "config", None)) for name, tensor in workload.make_batch(samples).items()}
        if arguments.get("label_smoothing_factor"):
            batch = with_decoder_inputs(batch, model)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = []
        for accumulation in (1, split):
            model.load_state_dict(weights)
            found.append(_gradient(workload, model, batch, samples // accumulation, accumulation, arguments, divide))
    whole, pieces = found
    norm = whole.norm().item()
    if not norm or not numpy.isfinite(norm):
        return None
    return GradientRatio(norm_ratio=pieces.norm().item() / norm, difference=(pieces - whole).norm().item() / norm)


def _gradient(
    workload: Workload,
    model: Any,
    batch: Mapping[str, torch.Tensor],
    micro: int,
    accumulation: int,
    arguments: Mapping[str, Any],
    divide: bool,
) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    class Keep(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            kept.extend(parameter.grad.flatten().clone() for parameter in model.parameters() if parameter.grad is not None)

    with tempfile.TemporaryDirectory(prefix="hfopt-") as folder:
        args = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            optim="sgd",
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            **arguments,
        )
        rows = [{name: _row(value, index) for name, value in batch.items()} for index in range(micro * accumulation)]
        trainer = _trainer_class(workload)(model=model, args=args, train_dataset=rows, data_collator=_stacked, callbacks=[Keep()])
        trainer.remove_callback(transformers.PrinterCallback)
        if divide:
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    return torch.cat(kept) if kept else torch.zeros(1)


def _trainer_class(workload: Workload) -> Any:
    own_loss = workload.compute_loss
    if own_loss is None:
        return transformers.Trainer

    class OwnLoss(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            assert own_loss is not None
            loss = own_loss(model, inputs)
            return (loss, {"loss": loss}) if return_outputs else loss

    return OwnLoss


def _row(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, torch.Tensor) else value


def _stacked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    first = rows[0]
    return {name: torch.stack([row[name] for row in rows]) if isinstance(first[name], torch.Tensor) else first[name] for name in first}


def _varied(name: str, tensor: Any, config: Any) -> Any:
    """Samples that differ from each other and are equally long."""
    if not isinstance(tensor, torch.Tensor):  # a flag such as return_loss
        return tensor
    if "mask" in name:
        return torch.ones_like(tensor)
    if tensor.is_floating_point():
        return torch.rand_like(tensor) if "labels" in name else torch.randn_like(tensor)
    if "positions" in name or "token_type_ids" in name:
        return tensor
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    classes = int(getattr(config, "num_labels", 2))
    vocabulary = int(getattr(text, "vocab_size", None) or 16)
    is_classes = name == "labels" and not tensor.gt(0).any()
    return torch.randint(0, classes, tensor.shape) if is_classes else torch.randint(2, max(3, vocabulary), tensor.shape)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Puts back random states, environment, verbosity and accelerate's shared state."""
    from accelerate import state

    shared = [cls._shared_state for cls in (state.PartialState, state.AcceleratorState, state.GradientState)]
    before = [dict(kept) for kept in shared]
    environment = dict(os.environ)
    seeds = random.getstate(), numpy.random.get_state()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        random.setstate(seeds[0])
        numpy.random.set_state(seeds[1])
        os.environ.clear()
        os.environ.update(environment)
        for kept, old in zip(shared, before, strict=True):
            kept.clear()
            kept.update(old)
