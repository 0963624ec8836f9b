"""Ranges: wider where less is known, and every card they name is one of the catalog."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfopt.hardware.catalog import cards
from hfopt.speed import device_speed
from hfopt.speed.device_speed import card_error, cards_error, cpu_speed, efficiency, limits, rate_error, settings_error

RUNS = Path(__file__).parents[2] / "benchmarks" / "data"


def test_a_card_without_training_rows_is_less_known() -> None:
    assert card_error("L4") > card_error("A10") == efficiency()["ranges"]["rate"]


def test_work_without_rows_is_less_known() -> None:
    assert rate_error(0.2, {"matmul": 0.9, "conv": 0.1}) == pytest.approx(0.2)
    assert rate_error(0.2, {"conv": 0.6}) == pytest.approx(0.2 * efficiency()["ranges"]["unseen_work"])


def test_ratios_are_known_better_than_rates() -> None:
    assert settings_error() < cards_error() < efficiency()["ranges"]["rate"]
    assert cards_error() == cards_error("A10", "RTX A6000") < cards_error("A10", "L4") < cards_error("Tesla T4", "L4")


def test_a_range_is_the_same_factor_up_and_down() -> None:
    low, high = limits(100.0, 0.25)
    assert (low, high) == (80.0, 125.0)


def test_the_cards_with_rows_are_those_of_the_benchmarks() -> None:
    named = set(efficiency()["ranges"]["cards"])
    assert named <= {card.name for card in cards()}
    with (RUNS / "trainer_runs.csv").open(newline="", encoding="utf-8") as stream:
        kinds = {row["card"].split(" ")[-1] for row in csv.DictReader(stream) if "samples" in row["unit"] and row["card"].startswith("RTX")}
    assert all(any(kind in card for card in named) for kind in kinds - {"24GB", "Ti"})


def test_a_cpu_whose_cores_others_take_is_measured_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def stretched(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: 1000 * clock()

    waiting = SimpleNamespace(perf_counter=stretched(time.perf_counter), thread_time=time.thread_time)
    monkeypatch.setattr(device_speed, "time", waiting)
    beside_others = cpu_speed()
    waiting.thread_time = stretched(time.thread_time)
    slow = cpu_speed()
    assert beside_others.matmul_flops["fp32"] > 50 * slow.matmul_flops["fp32"]
    assert beside_others.memory_bytes_per_s > 50 * slow.memory_bytes_per_s
    assert 50 * beside_others.host.forward_s < slow.host.forward_s
