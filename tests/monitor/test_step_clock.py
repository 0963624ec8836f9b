"""Every stretch between two events is what its end says it was, and the first step is warm-up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hfopt.monitor import step_clock
from hfopt.monitor.step_clock import StepClock

Play = Callable[..., StepClock]


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Play:
    """A clock that is told the time: each event with the seconds since the one before it."""
    now = [100.0]
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: now[0])

    def played(*events: tuple[str, float], clock: StepClock | None = None) -> StepClock:
        clock = clock or StepClock()
        for event, seconds in events:
            now[0] += seconds
            clock.event(event)  # type: ignore[arg-type]
        return clock

    return played


FIRST = (("train_begin", 1.0), ("step_begin", 50.0), ("pre_optimizer", 9.0), ("optimizer", 1.0), ("step_end", 1.0))


def test_the_first_step_is_left_out(play: Play) -> None:
    clock = play(*FIRST)
    assert clock.warm and clock.warmup_s == 62.0 and clock.tally.steps == 0 and clock.tally.total_s == 0.0


def test_a_step_with_accumulation_logging_evaluation_and_saving(play: Play) -> None:
    clock = play(*FIRST)
    play(
        ("log", 0.5),
        ("prediction", 2.0),
        ("log", 0.25),
        ("evaluate", 0.25),
        ("save", 3.0),
        ("step_begin", 4.0),
        ("substep_end", 5.0),
        ("pre_optimizer", 6.0),
        ("optimizer", 0.125),
        ("step_end", 0.0625),
        clock=clock,
    )
    tally = clock.take()
    phases = tally.phases()
    assert (phases.logging_s, phases.eval_s, phases.save_s, phases.data_wait_s) == (0.5, 2.5, 3.0, 4.0)
    assert (phases.forward_backward_s, phases.optimizer_s, phases.other_s) == (11.0, 0.125, 0.0625)
    assert (tally.steps, tally.micro_batches, tally.evals, tally.saves, tally.logs) == (1, 2, 1, 1, 1)
    assert phases.total_s == tally.total_s
    assert clock.tally.steps == 0 and clock.tally.total_s == 0.0


def test_waiting_for_other_ranks_is_not_waiting_for_data(play: Play) -> None:
    clock = play(*FIRST)
    play(("fetched", 0.5), ("step_begin", 7.0), clock=clock)
    assert (clock.tally.phases().data_wait_s, clock.tally.phases().other_s) == (0.5, 7.0)


def test_what_nobody_asks_for_is_added_up_in_time(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "_MOST_NOTES", 8)
    clock = play(*FIRST)
    for _ in range(50):
        play(("step_begin", 1.0), ("pre_optimizer", 2.0), ("step_end", 0.5), clock=clock)
        assert len(clock._notes) < 8
    assert (clock.tally.steps, clock.tally.phases().data_wait_s, clock.tally.total_s) == (50, 50.0, 175.0)


@pytest.mark.parametrize("queue", [0.0, 1.0, 20.0])
@pytest.mark.parametrize(("wait_cpu_s", "blocked_s", "expected"), [(0.01, 0.0, 0.1), (0.01, 0.05, 0.4), (0.0, 0.1, 0.5)])
def test_the_queue_for_a_core_is_no_wait_for_data(
    monkeypatch: pytest.MonkeyPatch, queue: float, wait_cpu_s: float, blocked_s: float, expected: float
) -> None:
    """A step of 0.1 s of CPU time, each second of which stands in the queue for as many more."""
    now_s, cpu_s = [0.0], [0.0]
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(step_clock.time, "thread_time", lambda: cpu_s[0])
    clock = StepClock()

    def pass_(event: str, cpu: float, blocked: float = 0.0) -> None:
        cpu_s[0] += cpu
        now_s[0] += cpu * (1 + queue) + blocked
        clock.event(event)  # type: ignore[arg-type]

    for _ in range(11):
        pass_("step_begin", wait_cpu_s, blocked_s)
        pass_("pre_optimizer", 0.08 - wait_cpu_s)
        pass_("step_end", 0.02)
    assert clock.tally.free_wait() == pytest.approx(expected)
    clock.take()
    clock.counts_cpu = False
    for event in ("step_begin", "pre_optimizer", "step_end"):
        pass_(event, 0.1)
    assert clock.tally.free_wait() is None
