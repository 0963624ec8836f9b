"""Memory and kernels of one batch size in about a CPU second: a shallow model is traced for one step, its states are counted.

What the forward and the backward hold beyond weights and states grows with the number of equal blocks along a line, which two shallow
models give; weights, gradients and states are counted (`state_bytes`). The peak is the higher of two moments:

    in the backward:  weights + states + what the two shallow traces say
    in the update:    weights + gradients + states + what the update itself takes

Good for what may be told as "about": which changes would make a job fit. The traces of `step_memory` are exact where this is not: what the
allocator keeps is that of the deeper shallow trace, or a share, and a peak that moves from one block to another between shallow and deep
is missed. Against whole traces of Llama-3.1-8B at 2048 tokens: +0.3 % for AdamW and fused AdamW, -0.6 % for 8-bit paged AdamW with a
fused loss, -1.7 % for LoRA, -5.2 % for QLoRA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hfopt.memory.allocator import parse_alloc_conf
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.layer_extrapolation import deeper_ops
from hfopt.memory.state_bytes import ParameterCount, count_parameters, deeper_count, state_bytes
from hfopt.memory.step_memory import context_bytes
from hfopt.memory.timeline import alone, live_over_time
from hfopt.schema import OpCost, StepSettings, Workload

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
    from hfopt.trace.rank_step import tracer_of
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
