"""The kernels of a step, grouped: equal kernels of the two traces, matched in order, with every quantity affine in the batch."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hfopt.schema import OpCost

if TYPE_CHECKING:
    from hfopt.trace.op_costs import Cost
    from hfopt.trace.trace import Trace


def grouped(first: Trace, second: Trace) -> tuple[OpCost, ...]:
    """One OpCost per distinct kernel; `count` is how often it runs in one micro-batch (or optimizer step)."""
    counts: Counter[OpCost] = Counter()
    for (phase, name, one), (_, _, two) in zip(first.costs, second.costs, strict=True):
        op = _affine(phase, name, (first.batch, one), (second.batch, two))
        counts[op] += one.launches
    return tuple(replace(op, count=float(count)) for op, count in counts.items())


def proportional(trace: Trace) -> tuple[OpCost, ...]:
    """From one trace alone: the kernels of a micro-batch grow with it, those of the optimizer do not."""
    counts: Counter[OpCost] = Counter()
    for phase, name, one in trace.costs:
        factor = 1 if phase == "optimizer" else 2
        grown = replace(one, flops=factor * one.flops, moved_bytes=factor * one.moved_bytes, shape=None)
        counts[_affine(phase, name, (trace.batch, one), (2 * trace.batch, grown))] += one.launches
    return tuple(replace(op, count=float(count)) for op, count in counts.items())


def _affine(phase: str, name: str, first: tuple[int, Cost], second: tuple[int, Cost]) -> OpCost:
    (batch, one), (other, two) = first, second
    span = other - batch

    def line(a: float, b: float) -> tuple[float, float]:
        slope = (b - a) / span
        return a - slope * batch, slope

    flops, moved = line(one.flops, two.flops), line(one.moved_bytes, two.moved_bytes)
    shape = tuple(line(a, b) for a, b in zip(one.shape, two.shape, strict=True)) if one.shape and two.shape else ()
    return OpCost(
        name=name,
        kind=one.kind,
        dtype=one.dtype,
        phase=phase,  # type: ignore[arg-type]
        count=0.0,
        flops_constant=flops[0],
        flops_slope=flops[1],
        bytes_constant=moved[0],
        bytes_slope=moved[1],
        shape=tuple((round(constant), round(slope)) for constant, slope in shape),
    )
