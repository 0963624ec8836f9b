"""What the pages draw: a step over its timeline, batches against memory and speed, and a run over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelinePoint:
    """Allocated memory at one moment of the step, by category (the names of Breakdown without `_bytes`)."""

    position: float  # 0..1, share of the step's allocation events gone by
    bytes_by_category: Mapping[str, int]
    moment: str | None = None  # phase, module and operation
    phase: str | None = None  # forward, backward, optimizer

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_category.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPoint:
    """What one per-device batch size would cost and bring, all else as chosen but the checkpointing."""

    batch: int
    checkpointing: bool
    device_bytes: int
    samples_per_s: float | None  # with the accumulation nearest to the effective batch
    fits: bool  # within the budget, the headroom left free
    may_be_chosen: bool = False  # it keeps the effective batch and whatever else is to stay
    chosen: bool = False
    every_n_layers: int = 0  # the curve it belongs to: 0 is no checkpointing, 1 every layer


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCharts:
    """What the page draws beside the facts."""

    timeline: tuple[TimelinePoint, ...] = ()  # one optimizer step at the chosen batch, in the order of its events
    peak: TimelinePoint | None = None  # the highest of them
    batches: tuple[BatchPoint, ...] = ()  # by curve, then by batch
    device_bytes: int | None = None  # what CUDA shows as the card's memory: the line no curve may cross
    budget_bytes: int | None = None  # what the plan may use of it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPoint:
    """One window of a run, for the charts."""

    until_s: float  # seconds after the run began at which the window ended; it began where the one before ended
    last_step: int
    figures: Mapping[str, float]  # the monitor's metrics (docs/monitor.md), without their prefix
    shares: Mapping[str, float]  # where the window's time went, adding up to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMark:
    """Something that began in a run: a finding, or memory that ran out."""

    title: str
    words: str
    step: int
    at_s: float  # after the run began


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as the page shows it."""

    name: str
    what: str  # model, device, versions
    ending: str
    begin_s: float  # where the first window begins; the first step is warm-up and in none
    points: tuple[RunPoint, ...]
    marks: tuple[RunMark, ...]
    figures: Mapping[str, float]  # of the whole run
    card_bytes: int | None = None
    ram_bytes: int | None = None
    power_limit_w: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDifference:
    """One line of before and after, in words."""

    what: str
    before: str
    after: str
    change: str = ""
    verdict: Literal["better", "worse", ""] = ""
