"""What fits is all that is reserved, at the very batch: not what survives by giving cached memory back, nor below what fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.real_steps import Growth, VaryingLengths
from hfopt.memory.timeline import AffineFormula, Timeline
from hfopt.schema import LengthSpread
from hfopt.trace.events import TILE, Where
from hfopt.units import MIB

CONTEXT = 100 * MIB


def curve_of(events: Sequence[tuple[int, int, int] | int]) -> MemoryCurve:
    """Each event takes a block of `constant + slope × batch` MiB, or frees one."""
    takes = [(event, 0, 0) if isinstance(event, int) else event for event in events]
    timeline = Timeline(
        blocks=np.array([block for block, _, _ in takes]),
        is_free=np.array([isinstance(event, int) for event in events]),
        constants=np.array([constant * MIB for _, constant, _ in takes], dtype=float),
        slopes=np.array([slope * MIB for _, _, slope in takes], dtype=float),
        places=[Where("forward", "model", "op")],
        place_of=np.zeros(len(takes), dtype=np.int64),
        categories={},
        marks={},
    )
    return MemoryCurve(timeline, CONTEXT)


def with_a_hole() -> MemoryCurve:
    """10 MiB a sample, freed; then 370 MiB, which find room in the freed block of 37 samples or more and need their own with fewer."""
    return curve_of([(1, 0, 10), 1, (2, 370, 0), 2])


def test_a_batch_below_the_largest_need_not_fit() -> None:
    curve, budget = with_a_hole(), CONTEXT + 400 * MIB
    assert curve.largest_batch(budget) == 40
    assert curve.fits(38, budget) and not curve.fits(36, budget)
    assert curve.fits(36, CONTEXT + 730 * MIB)


def test_what_runs_only_by_giving_cached_memory_back_does_not_fit() -> None:
    curve, budget = with_a_hole(), CONTEXT + 400 * MIB
    assert curve.replay(36).reserved_bytes == 730 * MIB
    assert curve.replay(36, capacity_bytes=400 * MIB).fits
    assert curve.fits(36, budget, giving_back=True) and not curve.fits(36, budget)


def test_the_largest_batch_counts_what_is_cached() -> None:
    curve = curve_of([(1, 0, 10), 1, (2, 0, 12), 2])  # the second never finds room in the first
    budget = CONTEXT + 440 * MIB
    assert curve.largest_batch(budget) == 20  # 22 MiB a sample
    assert curve.largest_batch(budget, giving_back=True) == 36  # 12 MiB a sample
    assert curve.peak(20).device_bytes <= budget


def with_a_tile(*, micro_batches: int) -> MemoryCurve:
    """Two steps of so many batches, each with a tile of 64 rows of 1 MiB a sample, at most 640 rows."""
    blocks = [number for block in range(1, 2 * micro_batches + 1) for number in (block, block)]
    marks = {f"step_{step}": 2 * micro_batches * step for step in range(2)} | {"end": len(blocks)}
    marks |= {f"step_{step}_micro_{micro}": 2 * (micro_batches * step + micro) for step in range(2) for micro in range(micro_batches)}
    tile = AffineFormula(TILE, ((0, 64), (640, 0), (MIB, 0)))
    timeline = Timeline(
        blocks=np.array(blocks),
        is_free=np.array([False, True] * (2 * micro_batches)),
        constants=np.zeros(len(blocks)),
        slopes=np.zeros(len(blocks)),
        places=[Where("forward", "head", "op")],
        place_of=np.zeros(len(blocks), dtype=np.int64),
        categories={},
        marks=marks,
        formulas=dict.fromkeys(range(0, len(blocks), 2), tile),
    )
    return MemoryCurve(timeline, CONTEXT, third_step_follows=True)


def with_states(curve: MemoryCurve, *, mib: float, before: str = "step_1") -> MemoryCurve:
    """The same with three states that are taken before the second step and stay."""
    timeline, at, count = curve.timeline, curve.timeline.marks[before], 3
    new = [timeline.next_block + number for number in range(count)]
    moved = {index + count * (index >= at): formula for index, formula in timeline.formulas.items()}
    marks = {name: event + count * (event >= at) for name, event in timeline.marks.items()}
    more = replace(
        timeline,
        blocks=np.insert(timeline.blocks, at, new),
        is_free=np.insert(timeline.is_free, at, [False] * count),
        constants=np.insert(timeline.constants, at, [mib * MIB] * count),
        slopes=np.zeros(len(timeline) + count),
        place_of=np.zeros(len(timeline) + count, dtype=np.int64),
        marks=marks,
        formulas=moved,
    )
    return replace(curve, timeline=more, uneven=True, _replays={})


def test_states_may_fit_into_an_emptier_batchs_tile_or_not() -> None:
    """Three of 20.25 MiB lie in a tile of 62 or 64 MiB, but not in one of 60: the third takes a segment of its own."""
    assert with_states(with_a_tile(micro_batches=1), mib=20.25).replay(1).reserved_bytes == (60 + 22 + 64) * MIB


def test_fuller_batches_that_cannot_run_in_what_the_others_reserve_take_it_all() -> None:
    """States in two tiles' segments: neither is given back for the fuller ones."""
    assert with_states(with_a_tile(micro_batches=2), mib=20.25).replay(1).reserved_bytes == (58 + 60 + 62 + 64) * MIB


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_fuller_batch_finds_no_room_in_the_tile_of_the_one_before(micro_batches: int) -> None:
    curve, tiles = with_a_tile(micro_batches=micro_batches), 62 + 64  # of a window's further ones, cached segments are given back
    assert curve.replay(1).reserved_bytes == 64 * MIB
    uneven = replace(curve, uneven=True, _replays={})
    assert uneven.replay(1).reserved_bytes == tiles * MIB
    assert uneven.replay(1).allocated_bytes == curve.replay(1).allocated_bytes
    assert uneven.replay(12).reserved_bytes == 640 * MIB  # a full tile is as large with a few rows less in the batch
    one = Growth(np.ones(len(curve.timeline)), np.zeros(len(curve.timeline)), np.zeros(len(curve.timeline)))
    dims = dict.fromkeys(curve.timeline.formulas, Growth(np.ones(3), np.zeros(3), np.zeros(3)))
    lengths = VaryingLengths(curve.timeline, LengthSpread(longest=64, lengths=(64,)), one, dims)
    both = replace(uneven, varying=lengths, _replays={})
    assert both.replay(1).reserved_bytes == tiles * MIB, "equal lengths of batches say nothing of their rows"
