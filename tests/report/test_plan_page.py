"""The plan's page in a real browser: no error, charts drawn, readable on a phone, and nothing a config says becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hfopt.report.plan_page import memory_by_batch, over_step, plan_page, throughput_by_batch
from hfopt.schema import Change, Correction, EngineChoice, PlanCharts, PlanFacts, Trial
from hfopt.units import GIB


def test_the_page_is_self_contained_and_says_what_changes(facts: PlanFacts, charts: PlanCharts) -> None:
    text = plan_page(facts, charts).decode()
    own = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert "://" not in own and "src=x" not in own.replace("&lt;img src=x", "")
    assert "per_device_train_batch_size" in own and own.count("1.50 times as fast") == 1 and "100 samples/s before" in own
    assert "&lt;/script&gt;&lt;img" in own


def test_a_batch_that_was_asked_for_is_not_said_to_be_the_same(facts: PlanFacts) -> None:
    assert "before = after" in plan_page(facts, PlanCharts()).decode()
    assert "requested; it was 96" in plan_page(replace(facts, effective_batch=128), PlanCharts()).decode()


def test_the_page_says_what_was_measured_and_how_devices_share_the_work(facts: PlanFacts) -> None:
    after = facts.after.candidate
    trial = Trial(device="virtual", candidate=after, outcome="ok")
    found = Correction(candidate=after, device="virtual", predicted_reserved_bytes=3 * GIB, measured_reserved_bytes=4 * GIB)
    engine = EngineChoice(name="FSDP2", reason="DDP does not fit", rejected=(("DDP", "<b>too large</b>"),), commands=("torchrun x.py",))
    plain = plan_page(facts, PlanCharts()).decode()
    assert "Predicted and" not in plain and "over 1 devices" not in plain
    text = plan_page(replace(facts, trial=trial, correction=found, engine=engine), PlanCharts()).decode()
    for words in (
        "3.00 GiB",
        "4.00 GiB",
        "-25.0 %",
        "Predicted and rehearsed",
        "rehearsed on the virtual GPU",
        "FSDP2 over 1 devices",
        "<pre>torchrun x.py</pre>",
        "&lt;b&gt;too large",
    ):
        assert words in text, words


def test_a_plan_that_changes_nothing_says_so(facts: PlanFacts) -> None:
    text = plan_page(replace(facts, changes=(), alternatives=(), rejected=()), PlanCharts()).decode()
    assert "Nothing to change" in text and 'class="chart"' not in text


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (390, True)])
def test_a_browser_draws_it(facts: PlanFacts, charts: PlanCharts, browser: Callable[..., dict[str, Any]], width: int, dark: bool) -> None:
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "dataloader_num_workers", "dataloader_persistent_workers")
    named = replace(facts, changes=tuple(Change(key=key, before=1, after=2, reason="a reason " * 20) for key in keys))
    seen = browser(plan_page(named, charts), width, dark=dark)
    assert seen["errors"] == [] and seen["requests"] == 0
    assert seen["title"] == "hfopt plan" and seen["images"] == 0
    assert seen["width"] == width and seen["overflow"] <= 0
    assert seen["dark"] is dark and seen["contrast"] >= 4.5
    assert len(seen["charts"]) == 3 and min(seen["charts"]) > 5
    assert 0 < seen["fold"] <= (800 if width == 1200 else 844), "verdict, changes and memory over the step are seen without scrolling"
    for words in ("peak: 5.75 GiB", "card: 8.00 GiB", "forward", "backward", "chosen: 48", "no checkpointing", "activations"):
        assert words in seen["words"], words


def test_the_charts_hold_what_the_plan_says(charts: PlanCharts) -> None:
    step = over_step(charts)
    stacked = [sum(trace.y[i] for trace in step.data if trace.stackgroup) for i in range(21)]
    assert stacked == pytest.approx([point.total_bytes / GIB for point in charts.timeline])
    (star,) = (trace for trace in step.data if trace.mode == "markers")
    assert star.x == (50.0,) and star.y == (5.75,)
    memory, rate = memory_by_batch(charts), throughput_by_batch(charts)
    for drawn, expected in ((memory, 68 / 16), (rate, 150 * 48 / 58)):
        (star,) = (trace for trace in drawn.data if trace.mode == "markers")
        assert star.x == (48,) and star.y == pytest.approx((expected,))
        dots = {
            trace.name: [x for x, size in zip(trace.x, trace.marker.size, strict=True) if size] for trace in drawn.data if trace is not star
        }
        assert dots == {"no checkpointing": [1, 2, 4, 6, 8, 12, 16, 24, 32], "checkpointing": [1, 2, 4, 6, 8, 12, 16, 24, 32, 48]}
    assert [shape.y0 for shape in memory.layout.shapes if shape.type == "line"] == [8]
    assert [shape.y1 for shape in memory.layout.shapes if shape.type == "rect"] == [7]
    assert [(shape.x0, shape.x1) for shape in rate.layout.shapes if shape.type == "rect"] == [(1, 64)]


def test_a_rate_below_one_is_not_rounded_to_one(charts: PlanCharts) -> None:
    slow = replace(charts, batches=tuple(replace(point, samples_per_s=0.79) for point in charts.batches))
    (star,) = (trace for trace in throughput_by_batch(slow).data if trace.mode == "markers")
    assert star.name == "chosen: 48, 0.79 samples/s"
