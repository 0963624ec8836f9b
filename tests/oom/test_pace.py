"""How long a smaller size lasts, over whole runs of windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hfopt.oom.step_down import RECENT, Pace, after_window

WINDOWS = st.lists(st.sampled_from([None, None, None, 1, 2, 4]), max_size=80)


@given(WINDOWS)
def test_a_size_is_always_a_divisor_below_the_whole(windows: list[int | None]) -> None:
    pace = Pace(full=8, grow_after=5)
    for passed_at in windows:
        pace = after_window(pace, passed_at)
        assert pace.size in (None, 1, 2, 4)
        assert len(pace.failed_sizes) <= RECENT


def test_rare_failures_never_settle() -> None:
    pace = Pace(full=8)
    for _ in range(10):
        pace = after_window(pace, 4)
        for _ in range(RECENT):
            pace = after_window(pace, None)
    assert pace.all_went_through


def test_three_failures_settle_and_quiet_windows_grow_back_step_by_step() -> None:
    pace = Pace(full=8, grow_after=5)
    for size in (4, 2, 4):
        assert pace.size is None
        pace = after_window(pace, size)
    assert pace.size == 2
    for expected in (4, None):
        for _ in range(5):
            assert pace.size != expected
            pace = after_window(pace, None)
        assert pace.size == expected


def test_growing_too_early_doubles_the_wait() -> None:
    pace = Pace(full=8, grow_after=5)
    for size in (4, 4, 4, *[None] * 5):
        pace = after_window(pace, size)
    assert pace.size is None
    pace = after_window(pace, 4)
    assert (pace.size, pace.wait) == (4, 10)
