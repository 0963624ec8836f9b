"""Trials: what a dry run says goes before what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hfopt.planner.trials import MOST_FAILURES, tried
from hfopt.schema import Candidate, Checkpointing, StepTime, Trial


def ranked(*batches: int) -> list[tuple[Candidate, StepTime]]:
    return [
        (
            Candidate(per_device_batch=batch, accumulation=64 // batch, precision="fp32"),
            StepTime(step_s=1 + 0.02 * i, busy_s=1, samples_per_s=64, tokens_per_s=None, mfu=None, bound="compute"),
        )
        for i, batch in enumerate(batches)
    ]


def trial(candidate: Candidate, outcome: Literal["ok", "oom", "error", "timeout"] = "ok", step_s: float | None = None) -> Trial:
    return Trial(device="cpu", candidate=candidate, outcome=outcome, step_s=step_s)


def test_without_a_device_the_prediction_stands() -> None:
    found = tried(ranked(64, 32), lambda candidate: None)
    assert (found.chosen, found.trial, found.runs) == (0, None, 0)


def test_out_of_memory_sends_the_next_smaller_batch() -> None:
    found = tried(ranked(64, 64, 32, 16), lambda c: trial(c, "oom" if c.per_device_batch > 16 else "ok"))
    assert found.chosen == 3 and [t.candidate.per_device_batch for t in found.failed] == [64, 32]
    assert found.trial is not None and found.trial.outcome == "ok"


def test_it_does_not_try_for_ever() -> None:
    found = tried(ranked(64, 32, 16, 8, 4, 2, 1), lambda c: trial(c, "oom"))
    assert len(found.failed) == MOST_FAILURES and found.trial is not None and found.trial.outcome == "oom"


def test_checkpointing_at_the_same_batch_is_what_needs_less() -> None:
    pool = ranked(64, 64)
    needs = {pool[0][0]: 10}
    light = replace(pool[1][0], checkpointing=Checkpointing(every_n_layers=1))
    found = tried(
        [pool[0], (light, pool[1][1])],
        lambda c: trial(c, "ok" if c.checkpointing.on else "oom"),
        needs_bytes=lambda c: needs.get(c, 5),
    )
    assert found.chosen == 1 and found.trial is not None and found.trial.outcome == "ok" and len(found.failed) == 1


def test_none_is_left_when_the_lightest_fails_too() -> None:
    assert tried(ranked(2, 1), lambda c: trial(c, "oom")).chosen is None


def test_the_fastest_measured_of_the_close_ones_is_taken() -> None:
    seconds = {64: 2.0, 32: 1.5, 16: 1.8, 8: 0.1}
    found = tried(ranked(64, 32, 16, 8), lambda c: trial(c, step_s=seconds[c.per_device_batch]), timings=3)
    assert found.chosen == 1 and found.runs == 3


def test_a_busy_machine_does_not_decide() -> None:
    found = tried(ranked(64, 32), lambda c: replace(trial(c, step_s=64 / c.per_device_batch), cpu_s=float(c.per_device_batch)), timings=2)
    assert found.chosen == 1


def test_an_error_ends_the_trials_and_is_shown() -> None:
    found = tried(ranked(64, 32), lambda c: trial(c, "error"), timings=3)
    assert found.chosen == 0 and found.trial is not None and found.trial.outcome == "error" and found.runs == 1
