"""The same workload from a live Trainer: its model without the weights, its collator on its longest samples, its own loss.

Nothing of the trainer changes: the model's structure is copied with every parameter on the meta device, methods are called on a shallow
copy of the trainer, and the random state is put back. A real build copies the weights too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hfopt.errors import WorkloadError
from hfopt.schema import BatchShape, DataSpec, Task, Workload
from hfopt.workload.batch import BatchMaker, accepted_inputs
from hfopt.workload.build import build_here, unfaked
from hfopt.workload.heads import task_of_class
from hfopt.workload.losses import why_batch_dependent
from hfopt.workload.recipe import repeated_blocks
from hfopt.workload.samples import Samples, longest_samples, same_random_state
from hfopt.workload.shapes import size_batch

_BIG_ATTRIBUTES = frozenset({"train_dataset", "eval_dataset", "model", "model_wrapped", "optimizer", "lr_scheduler", "accelerator"})


def from_trainer(trainer: Any) -> Workload:
    """The workload of a `transformers.Trainer` that is ready to train."""
    model = trainer.model
    if not isinstance(model, nn.Module):
        raise WorkloadError("the trainer has no model", hint="give the Trainer a model, or a model_init and call it once")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    template = _without_weights(model)
    task = task_of_class(type(base).__name__)
    with same_random_state():
        maker, shape, notes = _batches(trainer, base, task)
    return Workload(
        name=getattr(getattr(base, "config", None), "_name_or_path", "") or type(base).__name__,
        model_class=type(base).__name__,
        task=task,
        build_model=_Copies(live=model, template=template),
        make_batch=maker,
        shape=shape,
        compute_loss=_own_loss(trainer),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=repeated_blocks(base),
        tokens_per_sample=None if shape.length is None else shape.length + (shape.target_length or 0),
        checkpointable=bool(getattr(base, "supports_gradient_checkpointing", False)),
        batch_dependent_loss=why_batch_dependent(template, task, accepted_inputs(type(base))),
        notes=notes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copies:
    """Builds copies of the live model: without weights where tensors are fake or meta, with them for real."""

    live: nn.Module
    template: nn.Module

    def __call__(self) -> nn.Module:
        return build_here(lambda: copy.deepcopy(self.template), real=lambda: _copied(self.live, keep_weights=True))


def _without_weights(model: nn.Module) -> nn.Module:
    packed = next((type(parameter).__name__ for parameter in model.parameters() if hasattr(parameter, "quant_state")), None)
    if packed is not None:
        raise WorkloadError(
            f"the model's weights are packed ({packed}), and packed weights cannot be copied without their values",
            hint="plan from the config (hfopt plan CONFIG) instead of from the live trainer",
        )
    return _copied(model, keep_weights=False)


def _copied(model: nn.Module, *, keep_weights: bool) -> nn.Module:
    """A deep copy on the CPU; without weights each parameter is replaced by its outline on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = parameter.detach()
        copied = nn.Parameter(values.to("cpu", copy=True) if keep_weights else values.to("meta"), requires_grad=parameter.requires_grad)
        copied.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = copied
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    try:
        twin = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise WorkloadError(
            f"{type(model).__name__} cannot be copied: {error}",
            hint="plan from the config (hfopt plan CONFIG) instead of from the live trainer",
        ) from error
    for name in ("forward", "_original_forward"):  # what accelerate put around it belongs to the live model
        twin.__dict__.pop(name, None)
    if getattr(twin, "is_gradient_checkpointing", False):
        twin.gradient_checkpointing_disable()
    return twin.train()


def _own_loss(trainer: Any) -> Callable[[Any, dict[str, Any]], Any] | None:
    """The trainer's loss if it is its own; the Trainer's usual one is the model's (label smoothing is a setting of the step)."""
    from transformers import Trainer

    if type(trainer).compute_loss is Trainer.compute_loss and getattr(trainer, "compute_loss_func", None) is None:
        return None
    apart = _apart(trainer)

    def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
        return apart.compute_loss(model, dict(batch))

    return compute_loss


def _apart(trainer: Any) -> Any:
    """A shallow copy whose own notes (metrics, cached columns) are not the live trainer's."""
    apart = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if (isinstance(value, (dict, list, set)) or name in ("state", "control")) and name not in _BIG_ATTRIBUTES:
            try:
                setattr(apart, name, copy.deepcopy(value))
            except (TypeError, RuntimeError):
                setattr(apart, name, copy.copy(value))
    return apart


@dataclass(frozen=True, kw_only=True, slots=True)
class _Collated:
    """Batches from the trainer's collator on its longest samples."""

    collate: Callable[[list[Any]], Any]
    samples: Samples

    def __call__(self, count: int) -> dict[str, Any]:
        if count < 1:
            raise WorkloadError(f"a batch of {count} samples cannot be made", hint="the smallest batch size is 1")
        with same_random_state(), unfaked():
            return dict(self.collate([copy.copy(sample) for sample in self.samples.batch_of(count)]))


def _batches(trainer: Any, base: nn.Module, task: Task) -> tuple[Callable[[int], dict[str, Any]], BatchShape, tuple[str, ...]]:
    samples = longest_samples(trainer.train_dataset)
    if samples is None:
        return _assumed(base, task)
    apart = _apart(trainer)
    maker = _Collated(collate=apart._get_collator_with_removed_columns(apart.data_collator), samples=samples)
    try:
        batch = maker(2)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise WorkloadError(f"the trainer's collator does not take its own samples: {error}") from error
    seen = (
        f"the longest of {samples.seen} samples" if samples.seen == samples.of else f"the longest of {samples.seen} of {samples.of} samples"
    )
    return maker, _shape_of(batch, base), (f"batches are made of {seen}",)


def _assumed(base: nn.Module, task: Task) -> tuple[Callable[[int], dict[str, Any]], BatchShape, tuple[str, ...]]:
    """No dataset that may be looked at: the batch follows from the model, as it does for a config."""
    config = getattr(base, "config", None)
    if config is None or task == "custom":
        raise WorkloadError(
            "the trainer's dataset can only be read once, and its model does not say what a batch looks like",
            hint="give a map-style dataset (with __len__ and __getitem__)",
        )
    main_input = getattr(base, "main_input_name", "input_ids")
    sized = size_batch(config, main_input, task, DataSpec())
    maker = BatchMaker(task=task, shape=sized.shape, config=config, main_input=main_input, accepts=accepted_inputs(type(base)))
    return maker, sized.shape, ("the dataset was left alone: it is absent or can be read only once", *sized.notes)


def _shape_of(batch: dict[str, Any], base: nn.Module) -> BatchShape:
    """What the collator made, in our words."""
    sizes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
    tokens = sizes.get("input_ids", ())
    if len(sizes.get("pixel_values", ())) == 4:
        _, channels, height, width = sizes["pixel_values"]
        shape = BatchShape(kind="image", channels=channels, height=height, width=width, padded=False)
        return replace(shape, kind="image_text", length=tokens[1]) if len(tokens) == 2 else shape
    if len(tokens) == 2:
        mask = batch.get("attention_mask")
        padded = isinstance(mask, torch.Tensor) and bool((mask == 0).any())
        if getattr(getattr(base, "config", None), "is_encoder_decoder", False) and len(sizes.get("labels", ())) == 2:
            return BatchShape(kind="text_to_text", length=tokens[1], target_length=sizes["labels"][1], padded=padded)
        return BatchShape(kind="text", length=tokens[1], padded=padded)
    if len(sizes.get("input_values", ())) == 2:
        return BatchShape(kind="audio", audio_samples=sizes["input_values"][1])
    return BatchShape(kind="custom")
