"""The plan's page in a real browser: no error, charts drawn, readable on a phone, and nothing a config says becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hfopt.report.plan_page import plan_page
from hfopt.schema import PlanCharts, PlanFacts


def test_the_page_is_self_contained_and_says_what_changes(facts: PlanFacts, charts: PlanCharts) -> None:
    text = plan_page(facts, charts).decode()
    own = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "http" not in own and "src=x" not in own.replace("&lt;img src=x", "")
    assert "per_device_train_batch_size" in own and "1.50×" in own and "does not fit" in own
    assert "&lt;/script&gt;&lt;img" in own


def test_a_plan_that_changes_nothing_says_so(facts: PlanFacts) -> None:
    text = plan_page(replace(facts, changes=(), alternatives=(), rejected=()), PlanCharts()).decode()
    assert "Nothing to change" in text and 'class="chart"' not in text


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_a_browser_draws_it(facts: PlanFacts, charts: PlanCharts, browser: Callable[..., dict[str, Any]], width: int, dark: bool) -> None:
    seen = browser(plan_page(facts, charts), width, dark=dark)
    assert seen["errors"] == [] and seen["requests"] == 0
    assert seen["title"] == "hfopt plan" and seen["images"] == 0
    assert seen["width"] == width and seen["overflow"] <= 0
    assert seen["dark"] is dark and seen["contrast"] >= 4.5
    assert len(seen["charts"]) == 2 and min(seen["charts"]) > 5
