"""Memory and kernels of a training step: the least by counting parameters, exactly by tracing it; and what the process holds besides.

When the optimizer updates, all weights, all gradients and all its states exist at once, and the foreach implementation of AdamW takes a
square root of the second moments beside them (torch/optim/adamw.py, `_multi_tensor_adamw`: `exp_avg_sq_sqrt`). Activations, logits and
fragmentation come on top, so what does not fit by this bound fits by no estimate. Over several ranks it counts what each holds.

Known limits: parts that no batch reaches get neither gradient nor state; of those only the towers that a text batch leaves out are known.

What a process holds on the card besides PyTorch's allocator: the CUDA context and the kernels loaded on first use. The driver sets local
memory aside for every thread that can be resident, so a context grows with the card: a base and so many bytes per resident thread. Two
published figures give the line, others check it (NVML or nvidia-smi after the first CUDA call, kernels loaded lazily):

    RTX 4060, 24 multiprocessors        107 MiB at most   xMem's runs (arXiv 2510.21048): total memory less the highest sample    line
    RTX 6000 Ada, 142 multiprocessors   426 MiB           unslothai/unsloth-zoo pull request 1053, torch 2.10, CUDA 13            line
    RTX 3060, 28 multiprocessors        110 to 141 MiB    xMem's runs, from the runs that ended out of memory                     118
    V100, 80 multiprocessors            1343 MiB          transformers docs v4.20, CUDA 11.2: all kernels loaded at once          eager

The kernels a training step loads add 18 MiB: the median over xMem's 84 runs of NVML's peak less the replayed reserved memory. A value
measured on the card itself is better than this.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfopt.compat.versions import release
from hfopt.errors import TraceError
from hfopt.facts.argument_effects import FOREACH_ADAM, TORCH_ADAM, bitsandbytes_states
from hfopt.memory.allocator import AllocatorOptions, parse_alloc_conf
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.per_sample import per_sample_timeline
from hfopt.memory.real_steps import VaryingLengths, shortened, shorter_length, varying
from hfopt.memory.timeline import COARSE_BATCH, COARSE_NOTE, Timeline, alone, coarse_timeline, combine
from hfopt.schema import CompiledStep, LengthSpread, OpCost, Sharding, StepSettings, Workload
from hfopt.trace.events import resident_threads
from hfopt.units import MIB

if TYPE_CHECKING:
    from hfopt.trace.events import Trace
    from hfopt.trace.tracer import Script, Tracer


LOADED_KERNELS_BYTES = 18 * MIB
_BASE_BYTES = 42 * MIB
_BYTES_PER_THREAD = (426 - 107) * MIB // ((142 - 24) * 1536)
_EAGER_KERNELS_BYTES = 913 * MIB  # the V100's 1343 MiB less the line; pytorch/pytorch#107667: more than 1000 MB before CUDA 11.7


def context_bytes(capability: tuple[int, int] | None, cuda_version: str | None = None, *, multiprocessors: int | None = None) -> int:
    """Context and loaded kernels. Before CUDA 11.7 all kernels are loaded at once; without a card's size, a common one of its family."""
    context = _BASE_BYTES + _BYTES_PER_THREAD * resident_threads(capability or (8, 0), multiprocessors)
    eager = cuda_version is not None and release(cuda_version) < (11, 7)
    return context + (_EAGER_KERNELS_BYTES if eager else LOADED_KERNELS_BYTES)


__all__ = ["TRACED_BATCHES", "Estimate", "MemoryCurve", "estimate", "traced"]

CHECKED_BATCH = 6
_CHECKED_WITHIN = 0.005
TRACED_BATCHES = (2, 3)  # not 1: a dimension of size one is laid out in its own way


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one trace pair says: memory for every batch size, the kernels of a step, how long it took and what to know about it."""

    curve: MemoryCurve
    ops: tuple[OpCost, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    compiled: CompiledStep | None = None  # None: the eager step


def estimate(workload: Workload, settings: StepSettings) -> Estimate:
    """The curve over all batch sizes; a sharded step of many equal blocks is traced with fewer of them."""
    from hfopt.memory.layer_extrapolation import DepthCurve, deeper_ops, share_of, traced_depths

    depths = traced_depths(workload) if settings.sharding is not None and settings.sharding.engine != "ddp" else None
    if depths is None:
        return traced(workload, settings)
    assert workload.layers is not None, "a model without layers has no depths"
    (shallow, deep), share = (traced(one, settings) for one in depths), share_of(workload.layers)
    curve = DepthCurve(
        deep.curve.timeline, deep.curve.context_bytes, options=deep.curve.options, shallow=shallow.curve, deep=deep.curve, share=share
    )
    ops = deeper_ops(shallow.ops, deep.ops, share)
    return Estimate(curve=curve, ops=ops, seconds=shallow.seconds + deep.seconds, notes=deep.notes)


def traced(workload: Workload, settings: StepSettings) -> Estimate:
    """Traces the Trainer's step at two batch sizes."""
    from hfopt.trace.op_cost import grouped, proportional
    from hfopt.trace.tracer import tracer_of
    from hfopt.trace.trainer_step import trainer_script

    began = time.perf_counter()
    notes = list(workload.notes)
    assert not settings.torch_compile, "fake tensors show the eager step"
    script = trainer_script(settings, workload.compute_loss)
    context = context_bytes(settings.capability, multiprocessors=settings.multiprocessors)
    options = parse_alloc_conf(settings.allocator)
    with tracer_of(workload, settings) as tracer:
        first, second = (tracer.record(script, batch) for batch in TRACED_BATCHES)
        try:
            timeline = combine(first, second)
            spread = _varying(tracer, script, first, timeline, workload.lengths, notes)
            whole = settings.sharding is None
            curve = MemoryCurve(timeline, context, spread, third_step_follows=whole, options=options, uneven=workload.shape.padded)
            ops = grouped(first, second)
        except TraceError as error:
            if settings.sharding is None and (looped := _per_sample(tracer, script, (first, second), context, options)) is not None:
                return Estimate(curve=looped, ops=proportional(first), seconds=time.perf_counter() - began, notes=tuple(notes))
            second = tracer.record(script, COARSE_BATCH)
            peaks = (MemoryCurve(alone(one), 0, options=options).peak(one.batch) for one in (first, second))
            curve = MemoryCurve(coarse_timeline(*peaks), context)
            ops = proportional(first)
            notes.append(COARSE_NOTE.format(first.batch, second.batch, error))
    return Estimate(curve=curve, ops=ops, seconds=time.perf_counter() - began, notes=tuple(notes))


def _per_sample(
    tracer: Tracer, script: Script, traces: tuple[Trace, Trace], context_bytes: int, options: AllocatorOptions
) -> MemoryCurve | None:
    """The curve of a model that loops over its samples, if it holds at a batch that was not used for it.

    The third time round may be the first that is like all later ones: a gradient is made, then added to a new one, then in place.
    """
    true = MemoryCurve(alone(tracer.record(script, CHECKED_BATCH)), context_bytes, third_step_follows=True, options=options).peak(
        CHECKED_BATCH
    )
    for later in (False, True):
        one, two = (traces[1], tracer.record(script, traces[1].batch + 1)) if later else traces
        try:
            curve = MemoryCurve(per_sample_timeline(one, two), context_bytes, third_step_follows=True, options=options)
            found = curve.peak(CHECKED_BATCH)
        except TraceError:
            continue
        if abs(found.allocated_bytes - true.allocated_bytes) <= _CHECKED_WITHIN * true.allocated_bytes:
            return curve
    return None


def _varying(
    tracer: Tracer, script: Script, full: Trace, timeline: Timeline, spread: LengthSpread | None, notes: list[str]
) -> VaryingLengths | None:
    """A third trace at a shorter length, where the samples' lengths are known to vary; a note says what came of it."""
    shorter = None if spread is None else shorter_length(spread.longest)
    if spread is None or shorter is None:
        return None
    try:
        short = tracer.record(script, full.batch, change=lambda batch: shortened(batch, spread.longest, shorter))
        found = varying(timeline, full, short, spread, shorter)
    except TraceError as error:
        notes.append(f"each batch has its own length, but only the longest could be replayed ({error}): more may be reserved")
        return None
    notes.append(
        f"each batch is padded to its own longest sample: {found.steps} steps of drawn lengths up to {spread.longest} are replayed"
    )
    return found


# ------------------------------------------------------------------------------------------------- the least, by counting

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

    def in_float32(self) -> ParameterCount:
        """With what trains widened, as accelerate does under mixed precision (utils/fsdp_utils.py, fsdp2_prepare_model)."""
        trained = tuple(replace(one, element_bytes=max(4, one.element_bytes)) for one in self.trained)
        wider = ParameterCount(weights_bytes=self.weights_bytes, elements=self.elements, trained=trained)
        return replace(wider, weights_bytes=self.weights_bytes + wider.trained_bytes - self.trained_bytes)


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
        count = count.in_float32() if settings.mixed else count
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
    half = settings.mixed
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


def counted(workload: Workload) -> ParameterCount:
    """The parameters as the model has them while it trains, read off the meta device."""
    import torch

    with torch.device("meta"):
        model = workload.build_model()
    return count_parameters(model, text_only=workload.shape.kind in ("text", "text_to_text"))
