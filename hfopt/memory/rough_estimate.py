"""What a step holds at the least, by counting parameters, and a rough estimate of one batch size in about a CPU second.

When the optimizer updates, all weights, all gradients and all its states exist at once, and the foreach implementation of AdamW takes a
square root of the second moments beside them (torch/optim/adamw.py, `_multi_tensor_adamw`: `exp_avg_sq_sqrt`). Activations, logits and
fragmentation come on top, so what does not fit by this bound fits by no estimate. Over several ranks it counts what each holds.

Known limits: parts that no batch reaches get neither gradient nor state; of those only the towers that a text batch leaves out are known.

What the forward and the backward hold beyond weights and states grows with the number of equal blocks along a line, which two shallow
models give; weights, gradients and states are counted. The peak is the higher of two moments:

    in the backward:  weights + states + what the two shallow traces say
    in the update:    weights + gradients + states + what the update itself takes

Good for what may be told as "about": which changes would make a job fit. The traces of `step_memory` are exact where this is not: what the
allocator keeps is that of the deeper shallow trace, or a share, and a peak that moves from one block to another between shallow and deep
is missed. Against whole traces of Llama-3.1-8B at 2048 tokens: +0.3 % for AdamW and fused AdamW, -0.6 % for 8-bit paged AdamW with a
fused loss, -1.7 % for LoRA, -5.2 % for QLoRA.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfopt.facts.argument_effects import FOREACH_ADAM, TORCH_ADAM, bitsandbytes_states
from hfopt.memory.allocator import parse_alloc_conf
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.layer_extrapolation import deeper_ops
from hfopt.memory.step_memory import context_bytes
from hfopt.memory.timeline import alone, live_over_time
from hfopt.schema import OpCost, Sharding, StepSettings, Workload

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
    """DeepSpeed trains a half-precision copy and updates float32 weights, which are divided, as the optimizer's states are; whichever
    optimizer updates them, they are there."""
    half = settings.precision in ("bf16", "fp16")
    weights = min(count.weights_bytes, 2 * count.elements) if half else count.weights_bytes
    if sharding.engine == "zero3":
        weights = 0 if sharding.offload_parameters else weights // sharding.world_size
    states = 0
    if not sharding.offload_optimizer:
        of_the_optimizer = 8 * count.trained_elements if settings.optim in TORCH_ADAM else _optimizer_bytes(count, settings.optim)
        states = ((4 * count.trained_elements if half else 0) + of_the_optimizer) // sharding.world_size
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


SHALLOW, DEEP = 1, 3
LEAST_LAYERS = 6  # below, both depths together would hardly cost less than the model itself
FRAGMENTS = 0.02  # of what is allocated, that the allocator keeps besides at the least: a shallow trace has fewer sizes to keep


@dataclass(frozen=True, kw_only=True, slots=True)
class RoughStep:
    """One step at one batch size."""

    count: ParameterCount
    above_bytes: int  # the most that forward and backward hold beyond weights and states
    activations_bytes: int  # the same without gradients
    cached_bytes: int  # what the allocator keeps beside what is allocated
    context_bytes: int
    ops: tuple[OpCost, ...]

    def allocated_bytes(self, settings: StepSettings) -> int:
        held = state_bytes(self.count, settings)
        return max(held.weights_bytes + held.optimizer_bytes + self.above_bytes, held.total_bytes)

    def device_bytes(self, settings: StepSettings) -> int:
        """About what the process takes on the card, with the states of these settings."""
        return self._on_device(self.allocated_bytes(settings), self.cached_bytes)

    def sharded_bytes(self, settings: StepSettings) -> int:
        """The same for one rank of several, or one whose states are on the host: its shares, and whole what it works on."""
        held = state_bytes(self.count, settings)
        return self._on_device(held.total_bytes - held.update_bytes + max(held.update_bytes, self.activations_bytes), self.cached_bytes)

    def _on_device(self, allocated_bytes: int, cached_bytes: int) -> int:
        return allocated_bytes + max(cached_bytes, round(FRAGMENTS * allocated_bytes)) + self.context_bytes


def counted(workload: Workload) -> ParameterCount:
    """The parameters as the model has them while it trains, read off the meta device."""
    import torch

    with torch.device("meta"):
        model = workload.build_model()
    return count_parameters(model, text_only=workload.shape.kind in ("text", "text_to_text"))


def depths_of(workload: Workload) -> tuple[int, int] | None:
    """The numbers of blocks to trace; None: the whole model, which is not deep or not made of equal blocks."""
    deep = workload.layers is not None and workload.layers >= LEAST_LAYERS and workload.with_layers is not None
    return (SHALLOW, DEEP) if deep and workload.with_layers is not None and workload.with_layers(SHALLOW) is not None else None


def rough_step(models: Sequence[Workload], layers: int | None, settings: StepSettings, batch: int) -> RoughStep:
    """`models` are the model with SHALLOW and with DEEP blocks of its `layers`, or the model itself alone. One device's step, whatever
    the settings share over others."""
    settings = replace(settings, sharding=None)
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    traced = [_one_step(one, settings, batch) for one in models]
    low, high = traced[0], traced[-1]
    share = 0.0 if len(traced) < 2 or layers is None else (layers - SHALLOW) / (DEEP - SHALLOW)

    def carried(below: int, above: int) -> int:
        return max(above, round(below + (above - below) * share))

    return RoughStep(
        count=counted(models[0]) if len(traced) < 2 else deeper_count(counted(models[0]), counted(models[1]), share),
        above_bytes=carried(low.above_bytes, high.above_bytes),
        activations_bytes=carried(low.activations_bytes, high.activations_bytes),
        cached_bytes=high.cached_bytes,
        context_bytes=context,
        ops=low.ops if len(traced) < 2 else deeper_ops(low.ops, high.ops, share),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TracedStep:
    above_bytes: int
    activations_bytes: int
    cached_bytes: int
    ops: tuple[OpCost, ...]


def _one_step(workload: Workload, settings: StepSettings, batch: int) -> _TracedStep:
    """Up to the update, whose bytes are counted instead; its kernels count."""
    from hfopt.trace.op_cost import proportional
    from hfopt.trace.tracer import tracer_of
    from hfopt.trace.trainer_step import trainer_script

    with tracer_of(workload, settings) as tracer:
        trace = tracer.record(trainer_script(settings, workload.compute_loss, steps=1), batch)
    timeline = alone(trace)
    live = live_over_time(timeline, batch)
    replayed = MemoryCurve(timeline, 0, options=parse_alloc_conf(settings.allocator)).replay(batch)
    updates = [place.phase == "optimizer" for place in trace.places]
    before = next((event for event, (_, _, place) in enumerate(trace.events) if updates[place]), len(trace.events))
    gradients = live["gradients"][:before]
    activations = sum((parts[:before] for kind, parts in live.items() if kind not in ("weights", "optimizer", "gradients")), 0 * gradients)
    return _TracedStep(
        above_bytes=int((activations + gradients).max()),
        activations_bytes=int(activations.max()),
        cached_bytes=replayed.reserved_bytes - replayed.allocated_bytes,
        ops=proportional(trace),
    )
