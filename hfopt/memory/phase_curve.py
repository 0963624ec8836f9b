"""Memory of a compiled step over batch and depth: lines for each phase's begin, end and highest moment.

A compiler writes other code for other shapes: from one batch size to the next, and from one depth to the next, events come, go and change
places, so they cannot be matched one by one as those of eager traces are. What is alike is the course of a step: memory rises through the
forward, and falls or rises through the backward. So of each phase three things are carried on, along the depth for each batch size, then
along the batch: what lives when it begins, what lives when it ends, and its highest moment. The two ends lie on lines exactly; to each is
added how far memory rose above it in its half of the phase (a head's or one layer's temporaries, which no depth multiplies). The highest
moment is a maximum of lines, which a line through two of its points does not exceed beyond them; where it lies by the same end at both
depths it is that end's already, and what one more layer seems to add to it is the compiler's choice. The peak is the highest of all three.

Known limit: a moment amid a phase that is the highest of the deep model alone lies above all three.

What the allocator does not split off a block and what it keeps beyond is taken from the compiled runs: the largest share, and the most
bytes, which grow with the batch beyond the largest one that was compiled. CUDA graphs have a pool of their own, which what is done outside
of them (gradients that are copied out of it, the update) cannot use: that grows with the layers too, and is carried on like the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hfopt.errors import TraceError
from hfopt.memory.allocator import AllocatorOptions
from hfopt.memory.curve import MemoryCurve, Replay
from hfopt.memory.layer_extrapolation import live_by_phase
from hfopt.memory.timeline import Timeline, alone
from hfopt.trace.events import Category, Phase, Where

if TYPE_CHECKING:
    from hfopt.trace.events import Trace

Spot = tuple[Phase, Literal["begin", "end", "highest"]]
_SPOTS: tuple[Spot, ...] = tuple((phase, spot) for phase in ("forward", "backward", "optimizer") for spot in ("begin", "end", "highest"))


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledRun:
    """One compiled run: its trace, and what PyTorch's allocator counted in its last step."""

    trace: Trace
    allocated_bytes: int
    reserved_bytes: int
    uncollected_bytes: int = 0  # of what it held, left in cycles by compiling

    @property
    def spare_bytes(self) -> int:
        """What the allocator kept beyond."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def live_bytes(self) -> int:
        return int(max(live.max() for _, live in live_by_phase(alone(self.trace), self.trace.batch)))


@dataclass(slots=True)
class PhaseCurve(MemoryCurve):
    """`timeline` takes weights and states, then for each spot of a phase what lives beside them."""

    unsplit_share: float = field(default=0.0, kw_only=True)
    spare_bytes: int = field(default=0, kw_only=True)
    compiled_batch: int = field(default=1, kw_only=True)  # the largest
    pooled: tuple[float, float] = field(default=(0.0, 0.0), kw_only=True)  # what is kept beyond with CUDA graphs: constant, slope

    def replay(self, batch: int, options: AllocatorOptions | None = None, *, capacity_bytes: int | None = None) -> Replay:
        if batch < 1:
            raise TraceError(f"a batch size of {batch} cannot be estimated", hint="the smallest batch size is 1")
        sizes = self.timeline.sizes(batch)
        states = sum(sizes[:2])
        event = max(range(2, len(sizes), 2), key=lambda index: sizes[index])
        allocated = round((states + sizes[event]) * (1 + self.unsplit_share))
        spare = max(self.spare_bytes * max(1.0, batch / self.compiled_batch), self.pooled[0] + self.pooled[1] * batch)
        reserved = allocated + round(spare)
        return Replay(allocated, reserved, event, fits=capacity_bytes is None or reserved <= capacity_bytes)


def phase_curve(runs: Sequence[Sequence[CompiledRun]], share: float, context_bytes: int, *, captured: bool = False) -> PhaseCurve:
    """`runs` by depth and then by batch, two of each (one depth: the model's own); `share` of the difference of the depths is added.
    captured: with CUDA graphs."""
    shallow, deep = runs[0], runs[-1]
    points = [_carried(low.trace, high.trace, share) for low, high in zip(shallow, deep, strict=True)]
    first, second = (run.trace.batch for run in deep)
    held = [_on(_held(shallow[0].trace, kind), _held(deep[0].trace, kind), share) for kind in ("weights", "optimizer")]
    every = [run for depth in runs for run in depth]
    return PhaseCurve(
        _timeline(held, points, (first, second)),
        context_bytes,
        unsplit_share=max(0.0, *(run.allocated_bytes / run.live_bytes - 1 for run in every)),
        spare_bytes=max(run.spare_bytes for run in every),
        compiled_batch=second,
        pooled=_above(lambda run: run.spare_bytes, shallow, deep, share) if captured else (0.0, 0.0),
    )


def uncollected(runs: Sequence[Sequence[CompiledRun]], share: float) -> tuple[float, float]:
    """The part of the curve that a run may be without, as a line over the batch: constant, slope. Arguments as those of `phase_curve`."""
    return _above(lambda run: run.uncollected_bytes, runs[0], runs[-1], share)


def _above(
    what: Callable[[CompiledRun], int], shallow: Sequence[CompiledRun], deep: Sequence[CompiledRun], share: float
) -> tuple[float, float]:
    """The line over the batch that no carried-on figure lies above: constant, slope."""
    one, two = (_on(what(low), what(high), share) for low, high in zip(shallow, deep, strict=True))
    first, second = (run.trace.batch for run in deep)
    slope = max(0.0, (two - one) / (second - first))
    return max(one - slope * first, two - slope * second), slope


def _on(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _held(trace: Trace, kind: Category) -> int:
    """Bytes of a kind that live when the steps begin."""
    return sum(size for block, size, _ in trace.events[: trace.marks["step_0"]] if trace.categories.get(block) == kind)


def _carried(shallow: Trace, deep: Trace, share: float) -> dict[Spot, float]:
    found: dict[Spot, float] = {}
    stretches = zip(live_by_phase(alone(shallow), shallow.batch), live_by_phase(alone(deep), deep.batch), strict=True)
    for (phase, low), (_, high) in stretches:
        above_low, above_high = _above_ends(low), _above_ends(high)
        values: dict[Spot, float] = {
            (phase, "begin"): _on(float(low[0]), float(high[0]), share) + max(above_low[0], above_high[0]),
            (phase, "end"): _on(float(low[-1]), float(high[-1]), share) + max(above_low[1], above_high[1]),
        }
        values[phase, "highest"] = max(values.values()) if _at_one_end(low, high) else _on(float(low.max()), float(high.max()), share)
        for spot, value in values.items():
            found[spot] = max(found.get(spot, 0.0), value)
    return found


def _at_one_end(low: Any, high: Any) -> bool:
    """Whether the highest moment is as far from the begin in both, or as far from the end: a layer more moves one amid the phase."""
    layers = len(high) - len(low)
    begin = int(high.argmax()) - int(low.argmax())
    return min(abs(begin), abs(layers - begin)) < abs(layers) / 4


def _above_ends(live: Any) -> tuple[float, float]:
    """How far memory rises above its begin in the first half of a phase, and above its end in the second."""
    half = -(-len(live) // 2)
    return float(live[:half].max() - live[0]), float(live[-half:].max() - live[-1])


def _timeline(held: Sequence[float], points: Sequence[Mapping[Spot, float]], batches: tuple[int, int]) -> Timeline:
    import numpy as np

    places = [Where("load", "", ""), *(Where(phase, "", "") for phase, _ in _SPOTS)]
    constants, slopes, blocks, place_of, freed = list(held), [0.0, 0.0], [0, 1], [0, 0], [False, False]
    for number, spot in enumerate(_SPOTS, start=1):
        one, two = (max(0.0, point.get(spot, 0.0) - sum(held)) for point in points)
        slope = (two - one) / (batches[1] - batches[0])
        for is_free in (False, True):
            constants.append(one - slope * batches[0])
            slopes.append(slope)
            blocks.append(number + 1)
            place_of.append(number)
            freed.append(is_free)
    kinds: dict[int, Category] = {0: "weights", 1: "optimizer"}
    for number, (phase, _) in enumerate(_SPOTS, start=2):
        kinds[number] = "gradients" if phase == "optimizer" else "activations"
    return Timeline(
        blocks=np.array(blocks),
        is_free=np.array(freed),
        constants=np.array(constants),
        slopes=np.array(slopes),
        places=places,
        place_of=np.array(place_of),
        categories=kinds,
        marks={},
    )
