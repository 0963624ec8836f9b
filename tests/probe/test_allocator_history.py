"""A trace from the allocator's own history: two later steps, with what lives when they begin put before them."""

from __future__ import annotations

import pytest

from hfopt.probe.compiled_step import Moment, trace_of
from hfopt.trace.events import FREED, Trace

STEP = ("step", "forward", "backward", "optimizer")


class Run:
    """A run with one weight, one state from its first step on, and in each step inputs, an activation, a temporary and a gradient."""

    def __init__(self, events: list[tuple[int, int]], batch: int) -> None:
        self.events, self.moments = events, list[Moment]()
        self.batch = batch

    def begin(self, what: str) -> None:
        self.moments.append(Moment(begins=what, event=len(self.events)))

    def take(self, address: int, size: int) -> None:
        self.events.append((address, size))

    def free(self, address: int) -> None:
        self.events.append((address, FREED))

    def steps(self, count: int, *, workspace: bool) -> None:
        self.begin("run")
        self.take(1, 1000)
        self.begin("built")
        for step in range(count):
            self.begin("step")
            self.take(2, 8 * self.batch)
            self.begin("forward")
            if step == 0 and workspace:
                self.take(9, 77)
            self.take(3, 100 * self.batch)
            self.begin("backward")
            self.take(4, 50 * self.batch)
            self.take(5, 1000)
            self.free(4)
            self.free(3)
            self.begin("optimizer")
            if step == 0:
                self.take(6, 2000)
            self.free(5)
            self.free(2)
        self.begin("end")


def recorded(batch: int = 2, *, used_before: bool = False) -> Trace:
    events: list[tuple[int, int]] = [(9, 77)] if used_before else []
    run = Run(events, batch)
    run.steps(4, workspace=not used_before)
    return trace_of(run.events, run.moments, batch, skipped_steps=2)


def test_what_lives_when_the_steps_begin_is_put_before_them() -> None:
    trace = recorded()
    loaded = trace.events[: trace.marks["step_0"]]
    assert [(size, trace.places[place].phase) for _, size, place in loaded] == [(1000, "load"), (2000, "load"), (77, "load")]
    assert [trace.categories.get(block) for block, _, _ in loaded] == ["weights", "optimizer", None]


def test_both_steps_are_alike_and_everything_they_take_is_freed() -> None:
    trace = recorded()
    one, two = (trace.events[trace.marks[begin] : trace.marks[end]] for begin, end in (("step_0", "step_1"), ("step_1", "end")))
    assert [(size, place) for _, size, place in one] == [(size, place) for _, size, place in two]
    assert {block for block, size, _ in one if size != FREED} == {block for block, size, _ in one if size == FREED}
    assert {trace.categories.get(block) for block, size, _ in one if size != FREED} == {"inputs", "activations", "gradients", None}


@pytest.mark.parametrize("batch", [2, 5])
def test_a_workspace_that_is_older_than_the_run_stands_in_the_same_place(batch: int) -> None:
    fresh, used = recorded(batch), recorded(batch, used_before=True)
    assert fresh.events == used.events and fresh.categories == used.categories and fresh.marks == used.marks
