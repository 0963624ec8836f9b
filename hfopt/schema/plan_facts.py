"""Candidates, what a device said of them, and the plan that was chosen among them; and what the pages of plans and runs draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hfopt.schema.job import Assumption, Change, Precision, TrainJob
from hfopt.schema.step_cost import Checkpointing, EvaluationPeak, LoaderPlan, MemoryPeak, MemoryPhase, StepTime
from hfopt.schema.workload import Gpu, Hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One point of the search space. The effective batch is batch × accumulation × world and is the same for all of them."""

    per_device_batch: int
    accumulation: int
    precision: Precision
    checkpointing: Checkpointing = field(default_factory=Checkpointing)
    optim: str | None = None  # None: as the config has it
    attn_implementation: str | None = None
    torch_compile: bool = False
    use_liger_kernel: bool = False

    def precision_words(self, weights_dtype: str | None) -> str:
        """What it computes in: without autocast that is what the weights are stored in (None: float32)."""
        stored = {"bfloat16": "bf16 weights", "float16": "fp16 weights"}.get(weights_dtype or "")
        return stored if stored is not None and self.precision in ("fp32", "tf32") else self.precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """A candidate with what it is predicted to cost."""

    candidate: Candidate
    memory: MemoryPeak
    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    candidate: Candidate
    reason: str


REHEARSED_MICRO_BATCHES = 3
"""Of each step that a plan rehearses on the virtual GPU, with the inputs of all on the card: the first finds no gradients, the second does,
the third finds the cache as the second left it, and kernels compute nothing there. A test holds the peaks to be those of whole steps, to
the byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a dry run measured. `device` says on what: a real card, the CPU, or the virtual GPU (whose times mean nothing and are None)."""

    device: Literal["cuda", "cpu", "virtual"]
    candidate: Candidate
    outcome: Literal["ok", "oom", "error", "timeout"]
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_device_bytes: int | None = None
    eval_peak_reserved_bytes: int | None = None
    step_s: float | None = None
    cpu_s: float | None = None  # of one step, by all threads, on the CPU: what else the machine does stretches step_s, but not this
    data_wait_s: float | None = None
    message: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One candidate, predicted and measured. What it says about other batch sizes of this job is taken the safer way: memory that was
    missing grows with the batch, memory that was too much stays what it was."""

    candidate: Candidate
    device: Literal["cuda", "cpu", "virtual"]
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    predicted_step_s: float | None = None
    measured_step_s: float | None = None

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured, less one."""
        return _error(self.predicted_reserved_bytes, self.measured_reserved_bytes)

    @property
    def time_error(self) -> float | None:
        return _error(self.predicted_step_s, self.measured_step_s)

    def corrected_bytes(self, reserved_bytes: int) -> int:
        """A predicted size as it would be measured."""
        predicted, measured = self.predicted_reserved_bytes, self.measured_reserved_bytes
        if not predicted or measured is None:
            return reserved_bytes
        missing = measured - predicted
        return reserved_bytes + max(missing, round(missing * reserved_bytes / predicted))

    def predicted_room_bytes(self, room_bytes: int) -> int:
        """The largest predicted size that would be measured as no more than `room_bytes`: the inverse of `corrected_bytes`."""
        predicted, measured = self.predicted_reserved_bytes, self.measured_reserved_bytes
        if not predicted or not measured:
            return room_bytes
        return min(room_bytes - (measured - predicted), room_bytes * predicted // measured)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePeak:
    """The most memory one phase of a rehearsal held, on the rank and card that held most."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int
    part: str | None = None  # where in the phase: forward, backward, optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedPhase:
    """One phase of a rehearsed step: seconds until the card was through it, how long kernels ran in it, and how many."""

    phase: str
    wall_s: float
    busy_s: float
    launches: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedTime:
    """The time of an optimizer step, predicted from what the script launched on the virtual GPU. Nothing of it was measured on a card."""

    step_s: float
    busy_s: float  # a kernel runs
    samples_per_s: float | None  # of all ranks; None: the script has no Trainer that says how many a step has
    steps: int  # that were priced; the figures are their mean
    launches: int
    phases: tuple[RehearsedPhase, ...]
    idle_s: Mapping[str, float]  # by cause: input, launch, sync, python, communication
    shares: Mapping[str, float]  # by kind of kernel, of step_s
    clock_share: float | None = None
    power_w: float | None = None
    rate_error: float | None = None  # eight of ten rates predicted so were within this share of the measured one
    host_scale: float | None = None  # seconds of the predicted host for one of this host; None: the script's own Python was not timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A training script on the virtual GPU. Memory is PyTorch's own accounting; values and times mean nothing there."""

    outcome: Literal["fits", "unsupported", "oom", "failed", "incomplete", "timeout"]
    gpu: Gpu
    count: int
    context_bytes: int
    phases: tuple[PhasePeak, ...]
    steps_done: int
    script_exit_code: int | None  # None: the script was ended by the rehearsal
    message: str
    oom_step: int | None = None
    oom_phase: str | None = None
    ranks: int = 1
    findings: tuple[str, ...] = ()  # what the card does not support of what the script asks
    notes: tuple[str, ...] = ()
    wall_s: float | None = None
    time: RehearsedTime | None = None  # None: not asked for, or no step could be priced

    @property
    def capacity_bytes(self) -> int:
        return self.gpu.usable_bytes or self.gpu.memory_bytes

    @property
    def peak(self) -> PhasePeak | None:
        return max(self.phases, key=lambda phase: phase.reserved_bytes, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Neutrality:
    """Is trading batch for accumulation gradient-neutral for this model class and transformers version?"""

    model_class: str
    transformers_version: str
    neutral: bool
    ratio: float  # gradient norm of (n/k)×k over that of n×1
    fixable: bool  # model_accepts_loss_kwargs = False restores it
    reason: str


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
