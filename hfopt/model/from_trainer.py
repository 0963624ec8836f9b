"""A workload from a live Trainer: its model without the weights, its collator on its longest samples, its own loss.

Copies of a live model, with or without its weights, together with the modules its Trainer keeps beside it. Nothing of the trainer changes:
the model's structure is copied with every parameter on the meta device, methods are called on a shallow copy of the trainer, and the random
state is put back. A real build copies the weights too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from hfopt.compat.transformers_patches import disable_checkpointing, is_checkpointing
from hfopt.errors import WorkloadError
from hfopt.model.batch import BatchMaker, Unpadded, accepted_inputs
from hfopt.model.builder import build_here, checkpoint_dtype, is_flash, repeated_blocks
from hfopt.model.loading import mark_loaded
from hfopt.model.losses import carry, companions, known_dependence, modules_of, own_loss, why_batch_dependent
from hfopt.model.quantize import stand_in
from hfopt.model.sample_shape import size_batch
from hfopt.model.samples import (
    Collated,
    Samples,
    collator_of,
    generated_batches,
    generates,
    longest_samples,
    same_random_state,
    token_count,
)
from hfopt.model.sources import task_of_class
from hfopt.schema import Assumption, BatchShape, ConfigFacts, DataSpec, LengthSpread, Task, Workload

_FROM_CONFIG = "plan from the config (hfopt plan CONFIG) instead of from the live trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Builds copies of the live model: without weights where tensors are fake or meta, with them for real."""

    trainer: Any
    template: nn.Module

    @property
    def config(self) -> Any:
        """The model's own, None where it has none."""
        return getattr(self.template, "config", None)

    def __call__(self) -> nn.Module:
        return build_here(self._bare, real=lambda: _copied(self.trainer, keep_weights=True))

    def _bare(self) -> nn.Module:
        twin = copy.deepcopy(self.template)
        by_name = getattr(self.trainer.args, "model_init_kwargs", None) is not None  # TRL takes them where it loads the model itself
        return mark_loaded(twin) if by_name else twin


def copies_of(trainer: Any) -> Copies:
    _check_whole(trainer)
    unknown = next((type(parameter).__name__ for parameter in _packed_elsewhere(trainer.model)), None)
    if unknown is not None:
        raise WorkloadError(f"the model holds packed weights ({unknown}) outside of layers that hfopt knows", hint=_FROM_CONFIG)
    return Copies(trainer=trainer, template=_copied(trainer, keep_weights=False))


def _packed_elsewhere(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if stand_in(module) is None:
            yield from (parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "quant_state"))


def _check_whole(trainer: Any) -> None:
    """A model of which this process holds only a part does not show what a step takes."""
    if any(hasattr(parameter, "ds_id") or type(parameter.data).__name__ == "DTensor" for parameter in trainer.model.parameters()):
        raise WorkloadError("the model was loaded in shards (ZeRO-3, a DistributedConfig): its parts cannot be traced", hint=_FROM_CONFIG)
    if getattr(trainer, "is_model_parallel", False):
        raise WorkloadError("the model is spread over several devices (device_map): one device does not hold a step", hint=_FROM_CONFIG)


def _copied(trainer: Any, *, keep_weights: bool) -> nn.Module:
    """A deep copy on the CPU; without weights each parameter is replaced by its outline on the meta device."""
    model, beside = trainer.model, companions(trainer)
    memo: dict[int, Any] = {}
    for module in (model, *modules_of(beside)):
        for parameter in module.parameters():
            memo[id(parameter)] = _parameter(parameter, keep_weights=keep_weights)
        for buffer in module.buffers():
            memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
        if not keep_weights:  # packed weights have no outline of their own
            memo |= {id(part): standing for part in module.modules() if (standing := stand_in(part)) is not None}
    try:
        twin, beside = copy.deepcopy((model, beside), memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise WorkloadError(f"{type(model).__name__} cannot be copied: {error}", hint=_FROM_CONFIG) from error
    for module in (twin, *modules_of(beside)):
        _as_before_training(module)
    if beside:
        carry(twin, beside)
    if is_checkpointing(twin):
        disable_checkpointing(twin)
    if not keep_weights and uses_flash_kernel(twin):
        twin.set_attn_implementation("sdpa")
    assert isinstance(twin, nn.Module)
    return twin.train()


def uses_flash_kernel(model: Any) -> bool:
    """A package's CUDA kernel; PyTorch's own takes the same memory, where no sample is padded, which is how the packages see a batch."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return hasattr(model, "set_attn_implementation") and is_flash(name)


def _parameter(parameter: nn.Parameter, *, keep_weights: bool) -> nn.Parameter:
    values: torch.Tensor = parameter.detach()
    copied = nn.Parameter(values.to("cpu", copy=True) if keep_weights else values.to("meta"), requires_grad=parameter.requires_grad)
    copied.__dict__.update(parameter.__dict__)
    return copied


def _as_before_training(module: nn.Module) -> None:
    """Without what accelerate put around its forward; a forward of the user's own (or of TRL's) stays."""
    original = module.__dict__.pop("_original_forward", None)
    if original is None:
        return
    module.__dict__.pop("forward", None)
    if isinstance(original, MethodType) and original.__func__ is not type(module).forward:
        module.__dict__["forward"] = original


def from_trainer(trainer: Any) -> Workload:
    """The workload of a `transformers.Trainer` that is ready to train."""
    model = trainer.model
    if not isinstance(model, nn.Module):
        raise WorkloadError("the trainer has no model", hint="give the Trainer a model, or a model_init and call it once")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    copies = copies_of(trainer)
    task = task_of_class(type(base).__name__)
    with same_random_state():
        maker, shape, notes = _batches(trainer, base, task)
        lengths = _lengths(maker, shape, trainer.args) if isinstance(maker, Collated) else None
    return Workload(
        name=getattr(getattr(base, "config", None), "_name_or_path", "") or type(base).__name__,
        model_class=type(base).__name__,
        task=task,
        build_model=copies,
        make_batch=maker,
        shape=shape,
        compute_loss=own_loss(trainer),
        parameters=sum(
            parameter.numel() * (2 if parameter.dtype == torch.uint8 else 1) for parameter in model.parameters()
        ),  # two in a byte
        trainable_parameters=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        layers=repeated_blocks(base),
        tokens_per_sample=None if shape.length is None else shape.length + (shape.target_length or 0),
        checkpointable=bool(getattr(base, "supports_gradient_checkpointing", False)),
        batch_dependent_loss=_known_dependence(trainer) or why_batch_dependent(copies.template, task, accepted_inputs(type(base))),
        config=getattr(base, "config", None),
        facts=ConfigFacts.of(getattr(base, "config", None)),
        weights_dtype=_weights_dtype(model),
        checkpoint_dtype=checkpoint_dtype(getattr(base, "config", None)),
        lengths=lengths,
        assumed=_read_off(model, base, shape),
        notes=notes,
    )


def _read_off(model: nn.Module, base: nn.Module, shape: BatchShape) -> tuple[Assumption, ...]:
    """Nothing of a live model is guessed; what its samples leave open is in the notes."""
    attention = getattr(getattr(base, "config", None), "_attn_implementation", None)
    found = [Assumption(what="head", value=type(base).__name__)]
    if shape.length is not None:
        found.append(Assumption(what="length", value=f"{shape.length} tokens"))
    if shape.target_length is not None:
        found.append(Assumption(what="target length", value=f"{shape.target_length} tokens"))
    found.append(Assumption(what="weights", value=_weights_dtype(model)))
    found += [Assumption(what="attention", value=attention)] if attention is not None else []
    return (*found, Assumption(what="adapter", value="none" if model is base else type(model).__name__))


def _known_dependence(trainer: Any) -> str | None:
    kinds = (base.__name__.removesuffix("Trainer") for base in type(trainer).__mro__)
    found = (known_dependence(kind, vars(trainer.args)) for kind in kinds)
    return next((why for why in found if why is not None), None)


def _weights_dtype(model: nn.Module) -> str | None:
    """Of the weights that compute: adapters in float32 on a bfloat16 model do not make it a float32 model."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return str(max(sizes, key=sizes.__getitem__)).removeprefix("torch.") if sizes else None


def _batches(trainer: Any, base: nn.Module, task: Task) -> tuple[Callable[[int], dict[str, Any]], BatchShape, tuple[str, ...]]:
    if generates(trainer):
        return generated_batches(trainer)
    samples = longest_samples(trainer.train_dataset)
    if samples is None:
        return _assumed(base, task)
    flash = uses_flash_kernel(base)
    of_trl = any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__)
    seen = replace(samples, shorter=None) if flash else replace(samples, filled=of_trl)
    collated = Collated(collate=collator_of(trainer), samples=seen)
    maker: Callable[[int], dict[str, Any]] = Unpadded(collated=collated) if flash else collated
    try:
        batch = maker(2)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise WorkloadError(f"the trainer's collator does not take its own samples: {error}") from error
    notes = (f"batches are made of {_seen(samples)}",)
    return maker, _shape_of(batch, base), (*notes, "a flash-attention package is estimated as PyTorch's own kernel") if flash else notes


def _seen(samples: Samples) -> str:
    if samples.of is None:
        return f"the first {samples.seen} samples of a stream, all of one length"
    return (
        f"the longest of {samples.seen} samples" if samples.seen == samples.of else f"the longest of {samples.seen} of {samples.of} samples"
    )


def _lengths(maker: Collated, shape: BatchShape, args: Any) -> LengthSpread | None:
    """How the batches' lengths vary; None when the collator pads every batch alike, or when it is not known."""
    samples, tokens = maker.samples, token_count(maker.samples.longest)
    if shape.length is None or samples.shorter is None or not (samples.lengths and tokens) or shape.kind not in ("text", "text_to_text"):
        return None
    short = Collated(collate=maker.collate, samples=replace(samples, longest=samples.shorter, shorter=None))(2)
    if short["input_ids"].shape[1] == shape.length:
        return None
    multiple = next((m for m in (1, 8, 16, 32, 64, 128) if -(-tokens // m) * m == shape.length), 1)
    rounded = tuple(min(-(-length // multiple) * multiple, shape.length) for length in samples.lengths)
    grouped = getattr(args, "group_by_length", False) or getattr(args, "train_sampling_strategy", None) == "group_by_length"
    return LengthSpread(longest=shape.length, lengths=rounded, grouped=bool(grouped))


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
    return maker, sized.shape, ("the dataset was left alone: it is absent or can be read only once", *_sizes_guessed(sized.assumed))


def _sizes_guessed(assumed: tuple[Assumption, ...]) -> tuple[str, ...]:
    return tuple(f"{item.what}: {item.value}, a guess" for item in assumed if item.guessed)


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
