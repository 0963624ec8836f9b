"""Lengths that vary from batch to batch: the composed steps are those a trace at these lengths would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hfopt.memory.allocator import CachingAllocator
from hfopt.memory.real_steps import drawn_lengths, growth, shortened, shorter_length, varying
from hfopt.memory.step_memory import estimate
from hfopt.memory.timeline import FREED, combine
from hfopt.schema import LengthSpread, StepSettings, Workload
from hfopt.trace.events import Kernels
from hfopt.trace.tracer import Tracer, TraceSession, prepared
from hfopt.trace.trainer_step import trainer_script

LONGEST, BATCH = 64, 5
SPREAD = LengthSpread(longest=LONGEST, lengths=(16, 32, 40, 56, 64))


def _peaks(events: Any) -> tuple[int, int]:
    allocator = CachingAllocator()
    for block, size in events:
        if size == FREED:
            allocator.free(block)
        elif size:
            allocator.allocate(block, size)
    return allocator.peak_allocated, allocator.peak_reserved


class _OfLengths(TraceSession):
    """A session whose batches are each of their own length."""

    def __init__(self, session: TraceSession, tracer: Tracer, batches: list[dict[str, Any]]) -> None:
        made = iter(batches)
        super().__init__(session.model, lambda: tracer._fake_batch(next(made)), session.recorder)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_composed_steps_are_those_of_a_trace_at_these_lengths(
    tiny_gpt2: Callable[..., Workload], accumulation: int, precision: Any
) -> None:
    workload = tiny_gpt2(LONGEST, n_embd=256, vocab_size=5000)
    settings = StepSettings(accumulation=accumulation, precision=precision)
    tracer = Tracer(prepared(workload, settings), workload.make_batch, Kernels())
    script = trainer_script(settings)
    first, second = (tracer.record(script, batch) for batch in (2, 3))
    short = tracer.record(script, 2, change=lambda batch: shortened(batch, LONGEST, 48))
    composed = varying(combine(first, second), first, short, SPREAD, 48)
    lengths = [40, 64, 24, 56, 64, 32, 48, 64]
    steps = len(lengths) // accumulation
    batches = [shortened(workload.make_batch(BATCH), LONGEST, length) for length in lengths]
    direct = tracer.record(lambda session: trainer_script(settings, steps=steps)(_OfLengths(session, tracer, batches)), BATCH)
    allocated, reserved = _peaks((block, size) for block, size, _ in direct.events)
    assert _peaks(composed.events(BATCH, lengths)) == (pytest.approx(allocated, rel=1e-3), pytest.approx(reserved, rel=0.02))


def test_sizes_follow_the_length_by_their_kind() -> None:
    full, short = np.array([100, 640, 4096, 650, -1]), np.array([100, 480, 2304, 490, -1])
    found = growth(full, short, 64, 48)
    assert np.rint(full * found.at(0.5)).tolist() == [100, 320, 1024, 330, -1]


def test_a_shorter_batch_keeps_the_padding_of_either_side() -> None:
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, :4], mask[1, 60:] = 0, 0
    cut = shortened({"attention_mask": mask, "square": torch.zeros(2, 1, 64, 64), "label": torch.zeros(2)}, 64, 48)
    assert cut["attention_mask"].shape == (2, 48) and cut["square"].shape == (2, 1, 48, 48) and cut["label"].shape == (2,)
    assert cut["attention_mask"].sum(1).tolist() == [44, 44]


@pytest.mark.parametrize("longest", [512, 128, 100, 33])
def test_the_second_length_is_aligned_like_the_first(longest: int) -> None:
    shorter = shorter_length(longest)
    assert shorter is not None
    assert 0 < shorter < longest and shorter % 8 == longest % 8
    assert shorter_length(3) is None


def test_lengths_are_drawn_alike_and_meet_the_longest() -> None:
    assert drawn_lengths(SPREAD, 2, 12) == drawn_lengths(SPREAD, 2, 12)
    assert drawn_lengths(SPREAD, 2, 12)[-1] == LONGEST
    assert sum(drawn_lengths(SPREAD, 16, 50)) > sum(drawn_lengths(SPREAD, 1, 50))  # the longest of many is longer
    assert drawn_lengths(replace(SPREAD, grouped=True), 16, 12)[0] == LONGEST


def test_an_estimate_with_varying_lengths_reserves_no_less(tiny_gpt2: Callable[..., Workload]) -> None:
    workload = tiny_gpt2(LONGEST, n_embd=256, vocab_size=5000)
    same = estimate(workload, StepSettings())
    mixed = estimate(replace(workload, lengths=replace(SPREAD, grouped=True)), StepSettings())
    assert mixed.curve.varying is not None and any("drawn lengths" in note for note in mixed.notes)
    peaks = [(same.curve.peak(batch), mixed.curve.peak(batch)) for batch in (6, 24, 60)]
    assert all(a.allocated_bytes == b.allocated_bytes and a.reserved_bytes <= b.reserved_bytes for a, b in peaks)
    assert any(a.reserved_bytes < b.reserved_bytes for a, b in peaks)
    assert all(b.breakdown is not None and b.breakdown.total_bytes == b.device_bytes for _, b in peaks)
