"""A third step that repeats the second is the third step of a longer trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.step_memory import estimate
from hfopt.memory.timeline import FREED, ThirdStep, alone
from hfopt.schema import StepSettings, Workload
from hfopt.trace.events import Kernels
from hfopt.trace.tracer import Tracer, prepared
from hfopt.trace.trainer_step import trainer_script


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_third_step_is_that_of_a_longer_trace(tiny_gpt2: Callable[..., Workload], accumulation: int) -> None:
    workload, settings = tiny_gpt2(n_embd=256, vocab_size=5000), StepSettings(accumulation=accumulation)
    tracer = Tracer(prepared(workload, settings), workload.make_batch, Kernels())
    two, three = (alone(tracer.record(trainer_script(settings, steps=steps), 5)) for steps in (2, 3))
    repeated = [size for _, size in ThirdStep(two).events(two.sizes(5)) if size not in (0, FREED)]
    traced = [size for size in three.sizes(5)[three.marks["step_2"] : three.marks["end"]] if size not in (0, FREED)]
    assert repeated == traced and len(traced) > 50
    ours, longer = MemoryCurve(two, 0, third_step_follows=True).replay(5), MemoryCurve(three, 0).replay(5)
    assert (ours.allocated_bytes, ours.reserved_bytes) == (longer.allocated_bytes, longer.reserved_bytes)


def test_every_estimate_of_one_card_takes_it_and_keeps_the_moment(tiny_gpt2: Callable[..., Workload]) -> None:
    curve = estimate(tiny_gpt2(), StepSettings()).curve
    assert curve.third_step_follows
    traced_only = MemoryCurve(curve.timeline, curve.context_bytes).peak(7)
    peak = curve.peak(7)
    assert (peak.allocated_bytes, peak.moment) == (traced_only.allocated_bytes, traced_only.moment)
    assert peak.reserved_bytes >= traced_only.reserved_bytes
    assert peak.breakdown is not None and peak.breakdown.total_bytes == peak.device_bytes
