"""A step traced with two micro-batches and made longer is the step of a trace that runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hfopt.memory.curve import MemoryCurve
from hfopt.memory.real_steps import VaryingLengths
from hfopt.memory.step_memory import estimate
from hfopt.memory.timeline import Timeline, alone
from hfopt.schema import StepSettings, Workload
from hfopt.trace.events import Kernels
from hfopt.trace.tracer import Tracer, prepared
from hfopt.trace.trainer_step import TrainerLoop, trainer_script

BATCH = 5


def _traced(workload: Workload, accumulation: int) -> Timeline:
    settings = StepSettings(accumulation=accumulation)
    tracer = Tracer(prepared(workload, settings), workload.make_batch, Kernels())
    return alone(tracer.record(trainer_script(settings), BATCH))


def _taken(timeline: Timeline) -> list[int]:
    """Without the few bytes of the inputs, and those in which their items are counted."""
    return [size for size in timeline.sizes(BATCH) if size > 4096]


def test_two_micro_batches_become_three(tiny_gpt2: Callable[..., Workload], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = tiny_gpt2(n_embd=256, vocab_size=5000)
    two = _traced(workload, 2)
    monkeypatch.setattr(TrainerLoop, "micro_batches", 3)
    three = _traced(workload, 3)
    longer = two.of_window(3, third=True)
    assert longer is not None and len(_taken(longer)) > len(_taken(two))
    assert _taken(longer) == _taken(three)
    ours, whole = (MemoryCurve(one, 0, third_step_follows=True).replay(BATCH) for one in (longer, three))
    assert abs(ours.allocated_bytes - whole.allocated_bytes) <= 4096  # of scalars: which of them live on is not told
    assert ours.reserved_bytes == whole.reserved_bytes


@pytest.mark.parametrize("traced", [1, 2])
def test_the_window_before_is_there_while_one_is_fetched(tiny_gpt2: Callable[..., Workload], traced: int) -> None:
    workload = tiny_gpt2()
    few, many = _traced(workload, traced), _traced(workload, 40)
    longer = few.of_window(40, third=False)
    assert longer is not None
    inputs = [sum(size for event, size in enumerate(timeline.sizes(BATCH)) if _is_input(timeline, event)) for timeline in (longer, many)]
    assert inputs[0] == inputs[1]
    held = [MemoryCurve(one, 0, third_step_follows=True).replay(BATCH) for one in (longer, many)]
    if traced == 2:
        assert held[0].allocated_bytes == pytest.approx(held[1].allocated_bytes, rel=0.01)
        assert held[0].reserved_bytes == pytest.approx(held[1].reserved_bytes, rel=0.02)


def _is_input(timeline: Timeline, event: int) -> bool:
    return not timeline.is_free[event] and timeline.categories.get(int(timeline.blocks[event])) == "inputs"


def test_nothing_is_added_where_nothing_is_missing(tiny_gpt2: Callable[..., Workload]) -> None:
    two = _traced(tiny_gpt2(), 2)
    assert two.of_window(2, third=True) is two
    assert two.of_window(1, third=True) is two
    assert replace(two, marks={}).of_window(5, third=True) is None


def test_lengths_that_vary_find_the_inputs_of_the_whole_window(tiny_gpt2: Callable[..., Workload]) -> None:
    from hfopt.schema import LengthSpread

    workload = replace(tiny_gpt2(), lengths=LengthSpread(lengths=(16, 32, 64), longest=64))
    curve = estimate(workload, StepSettings(accumulation=2)).curve
    spread = curve.varying
    assert isinstance(spread, VaryingLengths)
    longer = curve.of_window(1000)
    assert longer is not None and longer.varying is not None
    before, after = (sum(size for _, size in one.events(BATCH) if size > 0) for one in (spread, longer.varying))
    assert after - before == 998 * sum(tensor.nbytes for tensor in workload.make_batch(BATCH).values())
