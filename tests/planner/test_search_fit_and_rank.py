"""Fitting and ordering, with memory and time models that are plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.memory.counted_step import budget_bytes
from hfopt.planner.search import TIE, Space, candidates, rank, split
from hfopt.schema import Candidate, Checkpointing, StepTime


def step(seconds: float) -> StepTime:
    return StepTime(step_s=seconds, busy_s=seconds, samples_per_s=1 / seconds, tokens_per_s=None, mfu=None, bound="compute")


def every(effective: int) -> tuple[Candidate, ...]:
    checkpointings = (Checkpointing(), Checkpointing(every_n_layers=1))
    return candidates(Space(effective_batch=effective, world_size=1, precisions=("fp32", "bf16"), checkpointings=checkpointings))


@given(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 500)))
def test_nothing_above_the_limit_is_kept_and_nothing_is_lost(effective: int, limit: int | None) -> None:
    pool = every(effective)
    fitting, rejected = split(pool, lambda candidate: limit, 1 << 30)
    assert all(limit is not None and c.per_device_batch <= limit for c in fitting)
    assert {*fitting, *(r.candidate for r in rejected)} == set(pool) and len(fitting) + len(rejected) == len(pool)
    assert all(r.reason for r in rejected)


@given(st.integers(1, 300), st.randoms(use_true_random=False))
def test_the_first_is_within_a_tie_of_the_fastest(effective: int, random: object) -> None:
    times = {c: step(random.uniform(1, 2)) for c in every(effective)}  # type: ignore[attr-defined]
    ordered = rank(times, times.__getitem__)
    assert len(ordered) == len(times)
    assert ordered[0][1].step_s <= min(t.step_s for t in times.values()) * (1 + TIE)
    for (_, earlier), (_, later) in pairwise(ordered):
        assert later.step_s >= earlier.step_s / (1 + TIE)


def test_ties_go_to_the_configs_own_settings() -> None:
    mine = Candidate(per_device_batch=8, accumulation=12, precision="fp32", checkpointing=Checkpointing(every_n_layers=1))
    assert mine in every(96)
    assert rank(every(96), lambda candidate: step(1.0), current=mine)[0][0] == mine
    assert rank(every(96), lambda candidate: step(1.03 if candidate == mine else 1.0), current=mine)[0][0] != mine


def test_ties_go_to_fewer_accumulation_steps_then_no_checkpointing() -> None:
    mine = Candidate(per_device_batch=5, accumulation=19, precision="fp32")
    ordered = rank(every(96), lambda candidate: step(1.0), current=mine)
    assert ordered[0][0] == Candidate(per_device_batch=96, accumulation=1, precision="fp32")
    assert [c.accumulation for c, _ in ordered] == sorted(c.accumulation for c, _ in ordered)


def test_a_larger_batch_is_taken_for_a_gain_alone() -> None:
    """Two of the file's own batch and four: no gain, and twice the activations."""
    mine = Candidate(per_device_batch=2, accumulation=8, precision="bf16", checkpointing=Checkpointing(every_n_layers=1))
    pool = [Candidate(per_device_batch=size, accumulation=16 // size, precision="bf16") for size in (4, 2, 1)]

    def time(gain: float) -> Callable[[Candidate], StepTime]:
        return lambda candidate: step(2.0 if candidate == mine else 1.0 if candidate.per_device_batch == 4 else 1.0 + gain)

    assert [c.per_device_batch for c, _ in rank([*pool, mine], time(0.01), current=mine)][:3] == [2, 4, 1]
    assert rank([*pool, mine], time(0.05), current=mine)[0][0].per_device_batch == 4


@pytest.mark.parametrize(("slower_s", "wins"), [(1.015, True), (1.02, True), (1.03, False)])
def test_times_within_two_percent_are_equal(slower_s: float, wins: bool) -> None:
    whole = Candidate(per_device_batch=8, accumulation=1, precision="fp32")
    halves = Candidate(per_device_batch=4, accumulation=2, precision="fp32")
    ordered = rank([whole, halves], lambda candidate: step(slower_s if candidate == whole else 1.0))
    assert (ordered[0][0] == whole) is wins


def test_among_equals_the_users_own_settings_come_first_and_nothing_is_added() -> None:
    full, half = (
        Candidate(per_device_batch=8, accumulation=1, precision="fp32", checkpointing=Checkpointing(every_n_layers=n)) for n in (1, 2)
    )
    for mine, other in ((full, half), (half, full)):
        assert [c for c, _ in rank([full, half], lambda candidate: step(1.0), current=mine)] == [mine, other]
    plain = Candidate(per_device_batch=4, accumulation=2, precision="fp32")
    for more in ({"optim": "adamw_torch_fused"}, {"attn_implementation": "sdpa"}, {"torch_compile": True}, {"use_liger_kernel": True}):
        added = Candidate(per_device_batch=8, accumulation=1, precision="fp32", **more)  # type: ignore[arg-type]
        assert rank([added, plain], lambda candidate: step(1.0))[0][0] == plain


def test_the_order_does_not_depend_on_the_order_of_the_input() -> None:
    pool = every(48)
    time = lambda candidate: step(1 + candidate.accumulation * 0.003)  # noqa: E731
    assert rank(pool, time) == rank(reversed(pool), time)


def test_headroom_is_a_share() -> None:
    assert budget_bytes(100, 0.06) == 94
    assert budget_bytes(100, 0) == 100
    for share in (6, 1, 1.5, -0.1):
        with pytest.raises(ValueError, match="share"):
            budget_bytes(100, share)


def test_a_rejection_says_how_much_would_have_fitted() -> None:
    pool = [Candidate(per_device_batch=8, accumulation=1, precision="fp32")]
    reasons = [split(pool, lambda candidate, limit=limit: limit, 1 << 30)[1][0].reason for limit in (None, 6)]
    assert reasons == [
        "not even one sample fits into 1.00 GiB",
        "batch 8 does not fit into 1.00 GiB: at most 6 with these settings",
    ]
