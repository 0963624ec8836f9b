"""Trials: what a dry run says goes before what was predicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hfopt.planner.trials import MOST_FAILURES, timed, tried
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


def test_times_are_looked_for_from_the_predicted_best_and_the_configs_own_settings() -> None:
    seconds = {64: 2.0, 32: 1.9, 16: 1.8, 8: 1.2, 4: 0.9, 2: 1.0, 1: 1.4}
    asked: list[int] = []

    def run(candidate: Candidate) -> Trial:
        asked.append(candidate.per_device_batch)
        return trial(candidate, step_s=seconds[candidate.per_device_batch])

    pool = ranked(64, 32, 16, 8, 4, 2, 1)
    found = timed(pool, run, pool[3][0])
    assert asked == [64, 8, 4, 16, 2, 4, 2] and found.runs == 7
    assert found.chosen == 4 and found.trial is not None and found.trial.step_s == 0.9


def test_cpu_time_decides_where_it_is_known() -> None:
    pool = ranked(64, 32)
    found = timed(pool, lambda c: replace(trial(c, step_s=64 / c.per_device_batch), cpu_s=float(c.per_device_batch)), pool[0][0])
    assert found.chosen == 1 and found.runs == 2  # too far apart to be timed again


def test_close_ones_are_timed_again_and_the_better_run_of_each_counts() -> None:
    disturbed = iter([0.9, 1.0, 0.9, 0.8])  # the first run of 32 was
    pool = ranked(64, 32)
    found = timed(pool, lambda c: trial(c, step_s=next(disturbed)), pool[1][0])
    assert found.runs == 4 and found.trial is not None
    assert (found.chosen, found.trial.step_s) == (1, 0.8)


def test_own_settings_that_fail_are_counted_and_left_out() -> None:
    pool = ranked(64, 32, 16, 8)
    for outcome in ("error", "oom"):
        found = timed(pool, lambda c, how=outcome: trial(c, how if c.per_device_batch == 8 else "ok", step_s=1.0), pool[3][0])
        assert found.runs == 5 and found.chosen == 0 and len(found.failed) == (outcome == "oom")


def test_a_broken_dry_run_is_said_and_nothing_timed_keeps_the_prediction() -> None:
    pool = ranked(64, 32)
    broken = timed(pool, lambda c: trial(c, "error"), pool[1][0])
    assert broken.chosen == 0 and broken.runs == 2 and broken.trial is not None and broken.trial.outcome == "error"
    assert timed(pool, lambda c: None, pool[1][0]).trial is None
    assert timed(pool, lambda c: trial(c, "oom"), pool[1][0]).chosen is None
    assert tried(ranked(64, 32), lambda c: trial(c, "error")).chosen == 0


def test_after_a_trial_out_of_time_no_other_is_started_and_the_configs_own_settings_stay() -> None:
    pool, asked = ranked(64, 32, 16), []

    def run(candidate: Candidate) -> Trial:
        asked.append(candidate.per_device_batch)
        return trial(candidate, "timeout")

    found = timed(pool, run, pool[2][0])
    assert asked == [64] and found.chosen == 2 and found.trial is not None and found.trial.outcome == "timeout"
    assert [one.candidate.per_device_batch for one in found.timed_out] == [64]


def test_what_was_measured_before_a_trial_ran_out_of_time_counts() -> None:
    pool, asked = ranked(64, 32, 16), []

    def run(candidate: Candidate) -> Trial:
        asked.append(candidate.per_device_batch)
        return trial(candidate, step_s=2.0) if candidate.per_device_batch == 64 else trial(candidate, "timeout")

    found = timed(pool, run, pool[1][0])
    assert asked == [64, 32] and found.chosen == 0 and found.trial is not None and found.trial.step_s == 2.0
    assert len(found.timed_out) == 1 and not found.failed
