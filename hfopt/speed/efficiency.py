"""`efficiency.toml`, read once, and the ranges it holds: how far a predicted rate may be off.

A range holds eight of ten published rates whose source had no part in the shares. Three questions, three figures
(benchmarks/speed_holdout.py): one rate; two settings on one card, where most of the error cancels; one job on two cards, where the cards'
own error stays. A card without published training rows is less known: what the power rule missed of cards it had not seen
(benchmarks/matmul_power.py) is added. A kind of work without such rows (convolutions) is taken for half as unsure again, by reasoning
alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
UNSEEN_SHARE = 0.3  # of a step in a kind of work that no published row has: then the step is of that kind


@cache
def efficiency() -> dict[str, Any]:
    parsed: dict[str, Any] = toml.loads((files("hfopt.speed") / "efficiency.toml").read_text(encoding="utf-8"))
    return parsed


def card_error(card: str) -> float:
    """The error that eight of ten rates on this card stay within."""
    ranges = efficiency()["ranges"]
    return float(ranges["rate"] if card in ranges["cards"] else math.hypot(ranges["rate"], ranges["unseen_card"]))


def rate_error(card_error: float, shares: Mapping[str, float]) -> float:
    """For a step with these shares of its time by kind of work."""
    ranges = efficiency()["ranges"]
    unseen = sum(shares.get(kind, 0.0) for kind in ranges["unseen_kinds"])
    return card_error * float(ranges["unseen_work"] if unseen > UNSEEN_SHARE else 1.0)


def settings_error() -> float:
    """Of the ratio between two settings on one card."""
    return float(efficiency()["ranges"]["settings"])


def cards_error() -> float:
    """Of the ratio between two cards at one job."""
    return float(efficiency()["ranges"]["between_cards"])


def limits(rate: float, error: float) -> tuple[float, float]:
    return rate / (1 + error), rate * (1 + error)
