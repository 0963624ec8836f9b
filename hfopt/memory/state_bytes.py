"""What a training step holds at the least: weights, gradients and optimizer states, by counting parameters. Nothing is traced.

When the optimizer updates, all weights, all gradients and all its states exist at once, and the foreach implementation of AdamW takes a
square root of the second moments beside them (torch/optim/adamw.py, `_multi_tensor_adamw`: `exp_avg_sq_sqrt`). Activations, logits and
fragmentation come on top, so what does not fit by this bound fits by no estimate. Over several ranks it counts what each holds.

Known limits: parts that no batch reaches get neither gradient nor state; of those only the towers that a text batch leaves out are known.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from hfopt.facts.optimizer_states import FOREACH_ADAM, TORCH_ADAM, bitsandbytes_states
from hfopt.schema import Sharding, StepSettings

_OTHER_TOWERS = re.compile(r"(^|[._])(vision|visual|audio|image|multi_modal|mm_)")
_NO_DECAY = re.compile(r"bias|norm", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedTensors:
    """Equal trained parameters."""

    count: int
    elements: int  # of each
    element_bytes: int
    embedding: bool
    decays: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    weights_bytes: int  # all parameters and buffers as they are stored while training, a reference model's among them
    elements: int
    trained: tuple[TrainedTensors, ...]

    @property
    def trained_bytes(self) -> int:
        return sum(one.count * one.elements * one.element_bytes for one in self.trained)

    @property
    def trained_elements(self) -> int:
        return sum(one.count * one.elements for one in self.trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Of one device, at the moment of the update."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    update_bytes: int = 0  # what the update itself takes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.update_bytes


def count_parameters(model: Any, *, text_only: bool = False) -> ParameterCount:
    """Of a module on any device, the meta device included; text_only: its batches hold no images and no sound."""
    import torch

    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    towers = text_only and any(not _OTHER_TOWERS.search(name) for name, _ in model.named_parameters())
    trained: Counter[tuple[int, int, bool, bool]] = Counter()
    elements = 0
    weights = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        weights += parameter.numel() * parameter.element_size()
        elements += parameter.numel()
        if parameter.requires_grad and not (towers and _OTHER_TOWERS.search(name)):
            trained[(parameter.numel(), parameter.element_size(), id(parameter) in embeddings, not _NO_DECAY.search(name))] += 1
    return ParameterCount(
        weights_bytes=weights,
        elements=elements,
        trained=tuple(
            TrainedTensors(count=count, elements=size, element_bytes=width, embedding=embedding, decays=decays)
            for (size, width, embedding, decays), count in trained.items()
        ),
    )


def deeper_count(shallow: ParameterCount, deep: ParameterCount, share: float) -> ParameterCount:
    """That of a model of more equal blocks: `share` times the difference of the two is added to the first."""

    def on(low: int, high: int) -> int:
        return round(low + (high - low) * share)

    few, many = ({replace(one, count=0): one.count for one in count.trained} for count in (shallow, deep))
    return ParameterCount(
        weights_bytes=on(shallow.weights_bytes, deep.weights_bytes),
        elements=on(shallow.elements, deep.elements),
        trained=tuple(replace(one, count=on(few.get(one, 0), count)) for one, count in many.items()),
    )


def state_bytes(count: ParameterCount, settings: StepSettings) -> StateBytes:
    """The least that one device holds while it updates."""
    sharding = settings.sharding
    if sharding is not None and sharding.engine in ("zero2", "zero3"):
        return _zero_bytes(count, settings, sharding)
    if sharding is not None and sharding.engine == "fsdp2":
        share = 0 if sharding.offload_parameters else sharding.world_size
        update = _update_bytes(count) if settings.optim == FOREACH_ADAM else 0
        parts = (count.weights_bytes, count.trained_bytes, _optimizer_bytes(count, settings.optim), update)
        weights, gradients, states, update = (part // share if share else 0 for part in parts)
        return StateBytes(weights_bytes=weights, gradients_bytes=gradients, optimizer_bytes=states, update_bytes=update)
    return StateBytes(
        weights_bytes=count.weights_bytes,
        gradients_bytes=count.trained_bytes,
        optimizer_bytes=_optimizer_bytes(count, settings.optim),
        update_bytes=_update_bytes(count) if settings.optim == FOREACH_ADAM else 0,
    )


def _zero_bytes(count: ParameterCount, settings: StepSettings, sharding: Sharding) -> StateBytes:
    """DeepSpeed trains a half-precision copy and updates float32 weights, which are divided, as Adam's two states are."""
    half = settings.precision in ("bf16", "fp16")
    weights = min(count.weights_bytes, 2 * count.elements) if half else count.weights_bytes
    if sharding.engine == "zero3":
        weights = 0 if sharding.offload_parameters else weights // sharding.world_size
    adam = settings.optim in TORCH_ADAM and not sharding.offload_optimizer
    states = count.trained_elements * (12 if half else 8) // sharding.world_size if adam else 0
    return StateBytes(weights_bytes=weights, gradients_bytes=0, optimizer_bytes=states)


def _optimizer_bytes(count: ParameterCount, optim: str) -> int:
    """0 for an optimizer whose states are not known here: still a bound."""
    if optim in TORCH_ADAM:
        return 2 * count.trained_bytes
    known = bitsandbytes_states(optim)
    if known is None:
        return 0
    return sum(one.count * known.element_bytes(one.elements, embedding=one.embedding) for one in count.trained)


def _update_bytes(count: ParameterCount) -> int:
    """foreach works through one group of one dtype at a time."""
    groups: Counter[tuple[int, bool]] = Counter()
    for one in count.trained:
        groups[(one.element_bytes, one.decays)] += one.count * one.elements * one.element_bytes
    return max(groups.values(), default=0)
