"""What the commands on runs, cards and the disk print with `--json`; types as in `outputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from hfopt.schema.job import Change
from hfopt.schema.trial import Rehearsal


class FindingEntry(TypedDict, total=False):
    """What held a run back, from one step on."""

    kind: str
    step: int
    time: float
    cause: str
    confidence: float
    evidence: Mapping[str, Any]
    message: str
    changes: Sequence[Change]
    predicted_gain: float | None


class ReceiptEntry(TypedDict, total=False):
    """What a plan had predicted, and what was measured."""

    time: float
    planned_for: str
    predicted_step_s: float | None
    measured_step_s: float | None
    predicted_reserved_bytes: int | None
    measured_reserved_bytes: int | None
    why_not: str | None


class RunOutput(TypedDict):
    """One run, finished, interrupted or going on."""

    log: str
    finished: bool
    interrupted: bool
    last_step: int
    max_steps: int | None
    steps: int
    seconds: float
    phases: Mapping[str, float]
    metrics: Mapping[str, float]
    findings: Sequence[FindingEntry]
    resolved: Mapping[str, int]
    fallbacks: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    gpus: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str | None]
    earlier_sessions: int
    receipt: ReceiptEntry | None


class TwoRunsOutput(TypedDict):
    """change: the share by which each metric that both runs have went up."""

    before: RunOutput
    after: RunOutput
    change: Mapping[str, float]


ReportOutput = RunOutput | TwoRunsOutput


class CardOutput(TypedDict):
    """A card of the catalog."""

    name: str
    memory_bytes: int
    usable_bytes: int
    capability: tuple[int, int]
    sms: int
    bandwidth_bytes_per_s: float
    peak_flops: Mapping[str, float]
    power_limit_w: float
    pcie_bytes_per_s: float
    nvlink_bytes_per_s: float | None
    nvlink_by_bridge: bool
    catalog_name: str
    source: str


class CardShareOutput(CardOutput, total=False):
    """mig: a share of the card (an instance of MIG)."""

    mig: bool


GpusOutput = Sequence[CardShareOutput]


RehearseOutput = Rehearsal


class KeptTrace(TypedDict):
    label: str
    size_bytes: int
    used_s: float
    file: str


class CacheOutput(TypedDict):
    """The traces kept on this disk."""

    folder: str
    most_bytes: int
    total_bytes: int
    entries: Sequence[KeptTrace]
