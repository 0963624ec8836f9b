"""The plan itself (what was chosen among what, and what only the user can do), and what the pages of plans and runs draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hfopt.schema.job import Assumption, Change, TrainJob
from hfopt.schema.step_cost import EvaluationPeak, LoaderPlan, MemoryPeak, MemoryPhase, StepTime
from hfopt.schema.trial import Candidate, Correction, Neutrality, Priced, Rejection, Trial
from hfopt.schema.workload import Hardware


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The settings before or after, priced."""

    candidate: Candidate
    memory: MemoryPeak
    time: StepTime
    loader: LoaderPlan
    fits: bool  # the training, and the first evaluation where there is one
    fault: str | None = None  # why it cannot run at all, so that no speed of it means anything
    evaluation: EvaluationPeak | None = None  # None: nothing is evaluated, it cannot be estimated, or the training does not fit already

    @property
    def runs(self) -> bool:
        return self.fits and self.fault is None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Something only the user may do: a larger effective batch, an environment variable, another card."""

    title: str
    detail: str
    flag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """How several devices share the work, why so, and how the result is started."""

    name: str  # 'DDP', 'FSDP2 (full shard)', 'ZeRO-3 with CPU offload'
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()  # other engines, each with its reason
    commands: tuple[str, ...] = ()  # each starts the result, exactly
    deepspeed: Mapping[str, Any] | None = None  # the DeepSpeed config, which `-o` writes beside the YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """What the planner decided; `hfopt.planner.Plan` wraps it with apply(), to_yaml() and report()."""

    job: TrainJob
    hardware: Hardware
    effective_batch: int
    budget_bytes: int  # what may be used on the card after headroom
    before: Chosen
    after: Chosen
    changes: tuple[Change, ...]
    alternatives: tuple[Priced, ...]
    rejected: tuple[Rejection, ...]
    advice: tuple[Advice, ...] = ()
    trial: Trial | None = None
    correction: Correction | None = None  # before and after are predicted; the limits of the others are corrected by it
    neutrality: Neutrality | None = None
    assumed: tuple[Assumption, ...] = ()
    warnings: tuple[str, ...] = ()  # said first, and to who asked for quiet too: this trains otherwise than it seems
    notes: tuple[str, ...] = ()
    about_the_file: tuple[str, ...] = ()  # those of the notes that are about keys of the config: shown with every report
    engine: EngineChoice | None = None  # None: one device
    phases: tuple[MemoryPhase, ...] = ()  # of a step that generates with vLLM on the same card
    weights_dtype: str | None = None  # what the weights are stored in while training; None is float32 or unknown
    as_written: Mapping[str, Change] = field(default_factory=dict)  # changes of keys that the file's tool spells otherwise
    repairs: tuple[Change, ...] = ()  # of what was outdated in the file, made before the plan
    launches: str = ""  # whose host the launches were priced for
    calibrated: str | None = None  # the day on which `hfopt calibrate` measured the device

    @property
    def changed_lines(self) -> tuple[Change, ...]:
        """All that becomes other in the file: repairs and plan; a key that both touch goes from its old value to its last."""
        planned = {change.key: change for change in self.changes}
        old = {repair.key: repair.before for repair in self.repairs}
        repairs = tuple(repair for repair in self.repairs if repair.key not in planned)
        changes = (replace(change, before=old.get(change.key, change.before)) for change in self.changes)
        return (*repairs, *(self.as_written.get(change.key, change) for change in changes))
