"""A live run: readings, windows of them, findings, and what is known of an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hfopt.schema.job import Change
from hfopt.schema.plan_facts import Candidate
from hfopt.schema.step_cost import Checkpointing, MemoryPeak, StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One NVML reading of one card; what the driver does not say is None."""

    uuid: str
    sm_util: float | None = None  # 0..1
    memory_util: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    own_used_bytes: int | None = None  # this process tree's share
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None  # since the driver was loaded
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle: tuple[str, ...] = ()
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    suspect: tuple[str, ...] = ()  # fields left out of averages because they cannot be


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One tick of the sampler."""

    time_s: float
    gpus: tuple[GpuReading, ...]
    cpu_util: float | None  # this process tree over the cores it may use, 0..1
    main_thread_util: float | None
    ram_used_bytes: int | None
    ram_total_bytes: int | None
    disk_read_bytes_per_s: float | None = None
    worker_util: float | None = None  # mean over the processes below this one, each against one core
    worker_count: int | None = None
    core_wait: float | None = None  # share of the time the training thread wanted to run and had no core


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuWindow:
    """One card over one window: averages of the readings that can be."""

    uuid: str
    sm_util: Spread | None = None
    memory_util: Spread | None = None
    used_bytes: int | None = None  # the highest seen
    own_used_bytes: int | None = None
    total_bytes: int | None = None
    power_w: Spread | None = None
    power_limit_w: float | None = None
    temperature_c: Spread | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    throttle: Mapping[str, float] = field(default_factory=dict)  # reason -> share of the readings
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    energy_j: float | None = None
    readings: int = 0
    suspect: int = 0  # values left out because they cannot be


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Where the seconds of a window went, by the host's clock; they add up to the window."""

    data_wait_s: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0
    logging_s: float = 0.0
    eval_s: float = 0.0
    save_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.train_s + self.logging_s + self.eval_s + self.save_s

    @property
    def train_s(self) -> float:
        return self.data_wait_s + self.forward_backward_s + self.optimizer_s + self.other_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A stretch of training: what the steps did and what the machine showed meanwhile."""

    first_step: int
    last_step: int
    steps: int
    seconds: float
    phases: Phases
    stopped_s: float = 0.0  # in which the process stood still; in neither of the two before
    synced: bool = True  # False: the host runs ahead of the device, so phase times are those of launching
    evals: int = 0
    saves: int = 0
    logs: int = 0
    samples: float | None = None  # of all ranks
    tokens: float | None = None
    padding_share: float | None = None  # of the tokens
    fixed_length: bool | None = None  # every batch seen was padded to one and the same length
    mfu: float | None = None
    gpus: tuple[GpuWindow, ...] = ()
    cpu_util: Spread | None = None
    main_thread_util: float | None = None
    process_cores: float | None = None  # cores kept busy by all threads of this process
    preempted: float | None = None  # of the times the training thread left its core, the share in which it was put off it
    core_wait: float | None = None  # share of the time in which the training thread wanted to run and others had the core
    free_wait: float | None = None  # where others use the machine: the share of waiting for data without the queue for a core
    worker_util: float | None = None
    worker_count: int | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    allocated_peak_bytes: int | None = None  # torch's, since the process began
    reserved_peak_bytes: int | None = None
    alloc_retries: int | None = None  # in this window
    energy_j: float | None = None

    @property
    def step_s(self) -> float | None:
        return self.phases.train_s / self.steps if self.steps else None

    def per_second(self, count: float | None) -> float | None:
        return count / self.seconds if count is not None and self.seconds > 0 else None


MeetingGap = Literal["after backward", "data", "before forward", "forward"]
"""Between two points where ranks wait for each other; in the order of the clock, from meeting to meeting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLag:
    """How much later than the others one rank comes to the points where they wait for each other, per step."""

    rank: int
    lag_s: float
    step_s: float
    where: MeetingGap


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What the diagnosis must know about the run besides its windows."""

    device: str  # cuda, cpu, mps, ...
    cores: float
    world_size: int = 1
    args: Mapping[str, Any] = field(default_factory=dict)  # the TrainingArguments that can be changed, as they are
    pcie_bytes_per_s: float | None = None
    planned: tuple[Change, ...] = ()  # the planner's, when there is a plan
    planned_gain: float | None = None
    keeps_accumulation: bool = False  # the planner found that trading batch for accumulation would change the gradients
    lags: tuple[RankLag, ...] = ()
    context_bytes: int | None = None  # of the CUDA context, when known
    layers: int | None = None  # modules without modules of their own: each is a handful of operations


Cause = Literal[
    "input_bound",
    "launch_bound",
    "compute_bound",
    "memory_headroom",
    "near_limit",
    "fragmentation",
    "throttled",
    "shared_gpu",
    "pcie_bound",
    "eval_heavy",
    "logging_heavy",
    "saving_heavy",
    "padding_waste",
    "slow_rank",
    "memory_creep",
    "cpu_starved",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What holds the run back, with the evidence."""

    cause: Cause
    confidence: float  # 0..1
    evidence: Mapping[str, float]
    message: str
    changes: tuple[Change, ...] = ()
    predicted_gain: float | None = None  # 0.3: 30 % more samples/s


@dataclass(frozen=True, kw_only=True, slots=True)
class OomSeen:
    """What is known at the moment memory ran out."""

    phase: Literal["forward", "backward", "optimizer", "evaluation", "unknown"]
    step: int
    micro_batch: int  # samples in the micro-batch that failed
    length: int | None = None  # its real length
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    requested_bytes: int | None = None
    capacity_bytes: int | None = None  # what this process could have at most: reserved and free together
    baseline_bytes: int | None = None  # allocated before the step began: weights, optimizer state, what else stays


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplanStep:
    """The next step down after an OOM."""

    action: Literal["retry_after_clearing", "chunk", "checkpointing", "restart", "give_up"]
    candidate: Candidate | None
    reason: str
    smallest_change: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackEvent:
    """What the fallback does: a micro-batch is about to run, memory ran out in it, what was decided, a window is through."""

    kind: Literal["micro_batch", "oom", "decision", "window"]
    step: int  # the Trainer's global step
    micro_batch: int  # its place in the accumulation window, from 0
    attempt: int  # 0: the first run; n: the n-th repetition of the window
    piece: int | None  # samples per piece; None: the whole micro-batch
    seen: OomSeen | None = None
    decision: ReplanStep | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NextSettings:
    """The settings to start from next time, after smaller pieces were needed, and why."""

    changes: Mapping[str, Any]
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFailure:
    """Why a process that ran out of memory ends: to be started again with these changes, or for good."""

    action: Literal["restart", "give_up"]
    reason: str
    output_dir: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    smallest_change: str | None = None


MemoryModel = Callable[[Candidate], MemoryPeak | None]
"""What a candidate takes; None where the model does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMemory:
    """A plan's memory curve as far as a fallback needs it: a `MemoryModel` made of values, which goes to other ranks and into a file.

    It knows the divisors of the planned micro-batch at the same effective batch, without and with checkpointing where that was traced.
    """

    peaks: tuple[tuple[Candidate, MemoryPeak], ...]

    def __call__(self, candidate: Candidate) -> MemoryPeak | None:
        return next((peak for known, peak in self.peaks if _takes_as_much(known, candidate)), None)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {
                "per_device_batch": known.per_device_batch,
                "accumulation": known.accumulation,
                "precision": known.precision,
                "checkpointing_every_n_layers": known.checkpointing.every_n_layers,
                "allocated_bytes": peak.allocated_bytes,
                "reserved_bytes": peak.reserved_bytes,
                "context_bytes": peak.context_bytes,
            }
            for known, peak in self.peaks
        ]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> PlannedMemory:
        return cls(peaks=tuple((_candidate_of(row), _peak_of(row)) for row in rows))


def _takes_as_much(known: Candidate, candidate: Candidate) -> bool:
    """tf32 allocates what fp32 does; which layers are checkpointed cannot be told from a running model."""
    alike = {known.precision, candidate.precision} <= {"fp32", "tf32"} or known.precision == candidate.precision
    return alike and known.per_device_batch == candidate.per_device_batch and known.checkpointing.on == candidate.checkpointing.on


def _candidate_of(row: Mapping[str, Any]) -> Candidate:
    return Candidate(
        per_device_batch=row["per_device_batch"],
        accumulation=row["accumulation"],
        precision=row["precision"],
        checkpointing=Checkpointing(every_n_layers=row["checkpointing_every_n_layers"]),
    )


def _peak_of(row: Mapping[str, Any]) -> MemoryPeak:
    sizes = {name: row[name] for name in ("allocated_bytes", "reserved_bytes", "context_bytes")}
    return MemoryPeak(batch=row["per_device_batch"], **sizes)


TimeModel = Callable[[Candidate], StepTime]
Batches = Sequence[int]
