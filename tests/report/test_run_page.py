"""The page of a run and of two runs in a real browser: no error, charts drawn, findings marked, readable on a phone and in the dark."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hfopt.errors import HfoptError
from hfopt.report.run_page import comparison_page, power, run_page
from hfopt.schema import RunDifference, RunView

ROWS = (RunDifference(what="samples/s", before="18", after="26", change="+44.4 %", verdict="better"),)
SETTINGS = (RunDifference(what="dataloader_num_workers", before="0", after="4"),)


def sound(seen: dict[str, Any], *, width: int, dark: bool, charts: int) -> None:
    assert seen["errors"] == [] and seen["requests"] == 0 and seen["images"] == 0 and "pwned" not in seen["title"]
    assert seen["width"] == width and seen["overflow"] <= 0
    assert seen["dark"] is dark and seen["contrast"] >= 4.5
    assert len(seen["charts"]) == charts and min(seen["charts"]) > 5


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1200, True), (390, False)])
def test_a_browser_draws_a_run(run: RunView, browser: Callable[..., dict[str, Any]], width: int, dark: bool) -> None:
    seen = browser(run_page(run), width, dark=dark)
    sound(seen, width=width, dark=dark, charts=5)
    for words in ("input_bound", "step 1001", "card: 24.00 GiB", "limit: 150 W", "min since the run began", "18.0 samples/s"):
        assert words in seen["words"], words


@pytest.mark.slow
def test_a_browser_draws_two_runs(run: RunView, browser: Callable[..., dict[str, Any]]) -> None:
    faster = replace(run, points=run.points[:30], marks=run.marks[1:], figures={**run.figures, "samples_per_s": 26.0})
    seen = browser(comparison_page(run, faster, ROWS, SETTINGS), 390, dark=True)
    sound(seen, width=390, dark=True, charts=5)
    for words in ("1.44×", "dataloader_num_workers", "GPU, before", "GPU, after", "b1", "b2", "a1", "+44.4 % better"):
        assert words in seen["words"], words
    assert "a2" not in seen["words"]


def test_what_the_log_says_is_never_markup(run: RunView) -> None:
    text = run_page(replace(run, notes=("<b>half a character: \ud800</b>",))).decode()
    assert "<img" not in text and "<b>half" not in text and "&lt;img" in text


def test_a_run_on_the_cpu_has_no_power_and_no_card(run: RunView) -> None:
    points = tuple(replace(point, figures={"cpu_util": 90.0, "ram_used_gib": 3.0, "data_wait": 0.1}) for point in run.points)
    text = run_page(replace(run, points=points, card_bytes=None, ram_bytes=8 << 30, power_limit_w=None)).decode()
    assert ">Power<" not in text and "machine: 8.00 GiB" in text and "card: " not in text


def test_a_run_without_a_window_has_no_charts(run: RunView) -> None:
    text = run_page(replace(run, points=(), marks=(), figures={}, notes=("No window was written.",))).decode()
    assert "No window was written." in text and "Nothing was found." in text and len(text) < 20_000


def test_without_plotly_a_page_with_charts_says_what_to_install(run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(HfoptError) as caught:
        run_page(run)
    assert caught.value.hint == "pip install 'hfopt[report]'"
    assert b"Nothing was found." in run_page(replace(run, points=(), marks=())), "a page without charts needs none"


def test_findings_that_began_together_share_their_line(run: RunView) -> None:
    together = replace(run, marks=tuple(replace(mark, at_s=12.0) for mark in run.marks))
    assert len(run.marks) > 1
    drawn = power([together])
    assert [text.text for text in drawn.layout.annotations if text.text.startswith("1")] == [
        ", ".join(str(place) for place in range(1, len(run.marks) + 1))
    ]
