"""Joining windows keeps what adds up, weighs what does not, and forgets no peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from watched import card, spread, window

from hfopt.monitor.window import Total, merge
from hfopt.schema import Phases, Spread


def test_times_and_counts_add_up_and_peaks_stay() -> None:
    first = window(alloc_retries=1, energy_j=10.0, allocated_peak_bytes=5)
    second = replace(window(alloc_retries=2, energy_j=5.0, allocated_peak_bytes=3), first_step=102, last_step=201)
    both = merge([first, second])
    assert (both.first_step, both.last_step, both.steps) == (2, 201, 200)
    assert both.seconds == first.seconds + second.seconds and both.phases.total_s == pytest.approx(both.seconds)
    assert (both.alloc_retries, both.energy_j, both.allocated_peak_bytes) == (3, 15.0, 5)


def test_shares_are_weighed_by_time_and_readings() -> None:
    short = window(times={"forward_backward_s": 5.0}, mfu=0.1, gpu=card(sm_util=spread(0.2), readings=10))
    long = window(times={"forward_backward_s": 85.0}, mfu=0.5, gpu=card(sm_util=spread(0.8), readings=90))
    both = merge([short, long])
    assert both.mfu == pytest.approx((0.1 * short.phases.train_s + 0.5 * long.phases.train_s) / both.phases.train_s)
    assert both.gpus[0].sm_util == Spread(mean=pytest.approx(0.74), low=0.2, high=0.8)


def test_unknown_stays_unknown_and_does_not_dilute() -> None:
    both = merge([window(mfu=None, padding_share=None), window(mfu=0.4, padding_share=None)])
    assert both.mfu == pytest.approx(0.4) and both.padding_share is None


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6))
def test_joining_one_by_one_is_joining_all(seconds: list[float]) -> None:
    windows = [replace(window(mfu=0.1 * index), phases=Phases(forward_backward_s=s), seconds=s) for index, s in enumerate(seconds)]
    whole, one_by_one = merge(windows), windows[0]
    for following in windows[1:]:
        one_by_one = merge([one_by_one, following])
    assert one_by_one.seconds == pytest.approx(whole.seconds)
    assert one_by_one.mfu == pytest.approx(whole.mfu)
    assert one_by_one.steps == whole.steps


def test_a_total_holds_few_windows_and_loses_none() -> None:
    total = Total()
    assert total.window() is None
    for number in range(1000):
        total.add(window(gpu=card(used_bytes=number)))
        assert len(total._windows) < 64
    whole = total.window()
    assert whole is not None and whole.steps == 100_000 and whole.gpus[0].used_bytes == 999
