"""The plan's page in a real browser: no error, charts drawn, readable on a phone, and nothing a config says becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hfopt.report.plan_page import plan_page
from hfopt.schema import PlanCharts, PlanFacts


def test_the_page_is_self_contained_and_says_what_changes(facts: PlanFacts, charts: PlanCharts) -> None:
    text = plan_page(facts, charts).decode()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)  # plotly's own source names addresses it does not call
    assert "http" not in own and "src=x" not in own.replace("&lt;img src=x", "")
    assert "per_device_train_batch_size" in own and "1.50×" in own and "does not fit" in own
    assert "&lt;/script&gt;&lt;img" in own


def test_a_plan_that_changes_nothing_says_so(facts: PlanFacts) -> None:
    text = plan_page(replace(facts, changes=(), alternatives=(), rejected=()), PlanCharts()).decode()
    assert "Nothing to change" in text and 'class="chart"' not in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_draws_it(
    facts: PlanFacts, charts: PlanCharts, tmp_path: Path, browser: Callable[[Path, int], dict[str, object]], width: int
) -> None:
    page = tmp_path / "plan.html"
    page.write_bytes(plan_page(facts, charts))
    seen = browser(page, width)
    assert seen["errors"] == []
    assert seen["title"] == "hfopt plan"
    assert seen["images"] == 0
    assert seen["width"] == width
    assert isinstance(seen["overflow"], int) and seen["overflow"] <= 0
    charts_drawn = seen["charts"]
    assert isinstance(charts_drawn, list) and len(charts_drawn) == 2 and min(charts_drawn) > 5
