"""What the plan's page draws: memory over the step by category, and memory and throughput over the batch size.

Nothing is traced for a chart: a curve is drawn where the search made its trace. The step is thinned to a few hundred moments, of which
each is the highest of those it stands for, so that the peak is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.timeline import live_over_time
from hfopt.planner.pricing import Pricing
from hfopt.planner.space import Space, divisors, micro_batches
from hfopt.schema import BatchPoint, Candidate, Checkpointing, Gpu, PlanCharts, TimelinePoint

MOMENTS = 240
BEYOND = 4  # times the effective batch that the curves go on where memory allows, to show what is left unused


def charts(pricing: Pricing, space: Space, winner: Candidate, gpu: Gpu | None) -> PlanCharts:
    timeline = _timeline(pricing.estimate(winner).curve, winner.per_device_batch)
    return PlanCharts(
        timeline=timeline,
        peak=max(timeline, key=lambda point: point.total_bytes, default=None),
        batches=tuple(_by_batch(pricing, space, winner)),
        device_bytes=None if gpu is None else gpu.usable_bytes or gpu.memory_bytes,
        budget_bytes=pricing.budget_bytes,
    )


def _timeline(curve: MemoryCurve, batch: int) -> tuple[TimelinePoint, ...]:
    """The step that holds the peak, which is the last one: the first has no optimizer state yet."""
    import numpy as np

    timeline = curve.timeline.at(batch)
    live = live_over_time(timeline, batch)
    total = np.sum(list(live.values()), axis=0)
    starts = sorted(event for name, event in timeline.marks.items() if name.startswith("step_"))
    first = max((start for start in starts if start <= int(np.argmax(total))), default=0)
    after = min((start for start in starts if start > first), default=len(timeline))
    end = first + int(np.flatnonzero(~timeline.is_free[first:after])[-1]) + 1  # what is let go after that is the end of the trace
    edges = np.unique(np.linspace(first, end, min(MOMENTS, end - first) + 1).astype(int))
    highest = [low + int(np.argmax(total[low:high])) for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    taking = np.maximum.accumulate(np.where(timeline.is_free, 0, np.arange(len(timeline))))  # the place of a free is that of what ran last
    points = []
    for event in highest:
        place = timeline.places[int(timeline.place_of[taking[event]])]
        held = {kind: int(values[event]) for kind, values in live.items()}
        points.append(
            TimelinePoint(
                position=(event - first) / max(1, end - first - 1),
                bytes_by_category={**held, "context": curve.context_bytes},
                moment=", ".join(part for part in (place.phase, place.module, place.op) if part),
                phase=place.phase,
            )
        )
    return tuple(points)


def _by_batch(pricing: Pricing, space: Space, winner: Candidate) -> Iterator[BatchPoint]:
    per_device = space.effective_batch // space.world_size
    choosable = set(micro_batches(space))
    for checkpointing in dict.fromkeys((Checkpointing(), *space.checkpointings, winner.checkpointing)):
        setting = replace(winner, checkpointing=checkpointing)
        if not pricing.known(setting):
            continue
        limit = pricing.known_limit(setting) or 0
        batches = sorted({*divisors(per_device), *_round_batches(max(per_device, min(2 * limit, BEYOND * per_device)))})
        for batch, device_bytes in zip(batches, pricing.nearest_device_bytes(setting, batches), strict=True):
            point = replace(setting, per_device_batch=batch, accumulation=max(1, round(per_device / batch)))
            chosen = point == winner
            yield BatchPoint(
                batch=batch,
                checkpointing=checkpointing.on,
                every_n_layers=checkpointing.every_n_layers,
                device_bytes=pricing.memory(winner).device_bytes if chosen else device_bytes,
                samples_per_s=pricing.time(point).samples_per_s,
                fits=batch <= limit,
                may_be_chosen=batch in choosable and checkpointing in space.checkpointings,
                chosen=chosen,
            )


def _round_batches(largest: int) -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: two per doubling."""
    batch = 1
    while batch <= largest:
        yield batch
        if 2 < 3 * batch <= 2 * largest:
            yield 3 * batch // 2
        batch *= 2
