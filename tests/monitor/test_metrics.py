"""Which metrics there are, that the documentation lists them, and how the reporters among the callbacks are found."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from watched import card, window

from hfopt.monitor.metrics import KEYS, PREFIX, find_callers, metrics, put_last

DOCS = Path(__file__).parents[2] / "docs" / "monitor.md"


def test_every_key_is_documented_as_it_is() -> None:
    table = [line for line in DOCS.read_text().splitlines() if line.startswith(f"| `{PREFIX}")]
    assert table == [f"| `{PREFIX}{name}` | {meaning} |" for name, (_, meaning) in KEYS.items()]


def test_figures_have_the_units_they_name() -> None:
    found = metrics(window())
    assert found["hfopt/gpu_util"] == pytest.approx(97.0) and found["hfopt/gpu_memory_used_gib"] == pytest.approx(18.0)
    assert found["hfopt/step_s"] == pytest.approx(0.595) and found["hfopt/data_wait"] == pytest.approx(1.0 / 59.5)
    assert found["hfopt/samples_per_s"] == pytest.approx(1600 / 60.0)


def test_what_is_unknown_has_no_key() -> None:
    assert "hfopt/gpu_power_w" not in metrics(window(gpu=card(power_w=None))) and "hfopt/mfu" not in metrics(window(mfu=None))


def test_outside_of_a_trainer_nobody_is_found() -> None:
    assert find_callers() == (None, None)


def test_going_last_leaves_the_list_that_is_walked_alone() -> None:
    walked = ["flow", "mine", "progress"]
    handler = SimpleNamespace(callbacks=walked)
    put_last(handler, "mine")
    assert handler.callbacks == ["flow", "progress", "mine"] and walked == ["flow", "mine", "progress"]
