"""What the commands on runs, logs, cards and the disk print with `--json`; types as in `outputs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from hfopt.schema.job import Change
from hfopt.schema.plan_facts import Rehearsal

OomPhase = Literal[
    "data",
    "loading",
    "setup",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "evaluation",
    "generation",
    "saving",
    "vllm_start",
    "communication",
    "unknown",
]
"""Where in a run: preparing data, loading weights, wrapping for several devices, the parts of a step, evaluating, writing completions,
saving, starting vLLM's engine, or exchanging between ranks."""

OomCause = Literal[
    "device_full",
    "fragmentation",
    "other_processes",
    "one_request",
    "refused_though_free",
    "limit",
    "spill",
    "library",
    "communication",
    "host",
    "host_killed",
    "shared_memory",
    "kv_cache",
    "vllm_share",
    "bad_size",
]
"""Why: the run fills the card; pieces of cache; others on the card; one tensor larger than the card; the driver refused; a limit that
was set; Windows lent the host's memory; cuBLAS and its kin found no room; NCCL found none; the host's memory; the kernel ended the
process; /dev/shm; no room for vLLM's cache; vLLM's share is not free; a size that is no size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFigures:
    """What the message states; None: it does not."""

    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None  # by PyTorch, allocated or not
    process_bytes: int | None = None  # with what is not PyTorch's
    others_bytes: int | None = None  # of other processes, stated or what is left
    limit_bytes: int | None = None

    @property
    def unused_bytes(self) -> int | None:
        """Reserved and not allocated."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return max(0, self.reserved_bytes - self.allocated_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class OomReport:
    """One shortage, as the log tells it."""

    source: str  # who said so: PyTorch, cuBLAS, NCCL, vLLM, the kernel, ...
    cause: OomCause
    phase: OomPhase
    figures: MemoryFigures
    line: int  # of the log
    text: str  # the message, as it may be repeated
    certain: bool = True  # False: the usual reason for such an end, which the log does not state
    evidence: str | None = None  # the line that tells the phase
    device: str | None = None
    ranks: tuple[int, ...] = ()
    batch: int | None = None  # per device, where the log states it
    accumulation: int | None = None
    step: int | None = None
    went_on: bool = False  # the log shows training behind the error: something handled it
    processes: Mapping[int, int] = field(default_factory=dict)  # other processes on the card, by id
    vllm: Mapping[str, float] = field(default_factory=dict)  # share, wanted, available and needed bytes, lengths


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingChange:
    """One change that would have fitted, or that helps where nothing can be computed (`device_bytes` None)."""

    what: str
    how: str
    device_bytes: int | None = None
    effect: str = "same"  # same, rounding, hardware or training: what it does to what is learned


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedOom:
    """The same step by prediction: what it would have taken, and where the replay runs out."""

    device: str
    available_bytes: int
    needed_bytes: int
    fits: bool
    batch: int
    moment: str | None  # phase, module and operation
    failed_bytes: int | None  # what was asked for there
    breakdown: Mapping[str, int] = field(default_factory=dict)
    matches: tuple[str, ...] = ()  # tensors of the size the message names


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    report: OomReport
    reasons: tuple[str, ...]  # sentences, most important first
    changes: tuple[FittingChange, ...]
    replay: ReplayedOom | None = None
    notes: tuple[str, ...] = ()


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
