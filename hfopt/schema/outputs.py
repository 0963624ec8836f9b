"""What the commands print with `--json`: one type per output, from which `hfopt schema` makes the JSON schema that programs can rely on.

The functions that build an output return these types, so mypy keeps them and the schema together; a frozen value inside one is printed
with all of its fields. A key that is not always there stands in a class of its own with `total=False`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from hfopt.schema.job import Assumption, Change, DataSpec, ModelSpec, Place, Precision, TrainerKind
from hfopt.schema.plan_facts import Advice, Candidate, EngineChoice
from hfopt.schema.run_outputs import FittingChange, OomCause, OomPhase, ReplayedOom
from hfopt.schema.step_cost import Breakdown, EngineName, EvaluationPeak, MemoryPhase

# ---------------------------------------------------------------------------------------------------------------- errors


class ErrorPlace(TypedDict):
    """Where: a place in a file, an option, or what was given for it or for the command (a model, a card, a folder)."""

    path: str | None
    line: int | None
    column: int | None
    option: str | None
    argument: str | None


class ErrorDetail(TypedDict):
    """kind: the class of the error (UsageError: the command line itself). exit_code: what the command ends with."""

    kind: str
    what: str
    where: ErrorPlace | None
    fix: str | None
    exit_code: int


class ErrorOutput(TypedDict):
    """Instead of an answer, on stdout, for every command that was asked for JSON."""

    error: ErrorDetail


# ------------------------------------------------------------------------------------------------------------------ plan


class SettingsOutput(TypedDict):
    """What a plan may choose."""

    per_device_batch: int
    accumulation: int
    precision: Precision
    checkpointing_every_n_layers: int
    optim: str | None
    torch_compile: bool
    use_liger_kernel: bool
    attn_implementation: str | None


class EvaluationOutput(TypedDict):
    """The first evaluation during training."""

    per_device_eval_batch_size: int
    eval_accumulation_steps: int | None
    keeps_predictions: bool
    kept_bytes_per_sample: int
    peak_allocated_bytes: int
    fits: bool


class ChosenOutput(SettingsOutput):
    """Settings with what they are predicted to take."""

    samples_per_s: float
    rate_error: float | None
    step_s: float
    clock_share: float | None
    power_w: float | None
    gpu_utilization: float
    bound: Literal["compute", "bandwidth", "launch", "communication", "input"]
    mfu: float | None
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    peak_device_bytes: int
    breakdown: Breakdown | None
    dataloader_num_workers: int
    fits: bool
    fault: str | None
    evaluation: EvaluationOutput | None


class AlternativeOutput(SettingsOutput):
    samples_per_s: float
    step_s: float
    peak_reserved_bytes: int


class RejectedOutput(SettingsOutput):
    reason: str


class TrialOutput(TypedDict):
    """What a dry run measured: on a card, on the CPU, or on the virtual GPU, whose times mean nothing and are null."""

    device: Literal["cuda", "cpu", "virtual"]
    candidate: Candidate
    outcome: Literal["ok", "oom", "error", "timeout"]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None
    eval_peak_reserved_bytes: int | None
    step_s: float | None
    cpu_s: float | None
    data_wait_s: float | None
    message: str | None


class VerifiedOutput(TrialOutput, total=False):
    """Beside it what was predicted for the same settings; an error is predicted over measured, less one."""

    predicted_reserved_bytes: int | None
    predicted_step_s: float | None
    memory_error: float | None
    time_error: float | None


class _PlanAnswer(TypedDict):
    assumed: Sequence[Assumption]
    warnings: Sequence[str]
    effective_batch: int
    device: str
    budget_bytes: int
    changes: Sequence[Change]
    before: ChosenOutput
    after: ChosenOutput
    verified: VerifiedOutput | None
    alternatives: Sequence[AlternativeOutput]
    rejected: Sequence[RejectedOutput]
    advice: Sequence[Advice]
    notes: Sequence[str]
    weights_dtype: str | None
    phases: Sequence[MemoryPhase]
    engine: EngineChoice | None


class PlanOutput(_PlanAnswer, total=False):
    """A plan. error: its own dry run failed, and no config was written."""

    error: ErrorDetail


# -------------------------------------------------------------------------------------------- estimate, compare and diff


class EstimateRow(TypedDict):
    """One batch size, with or without gradient checkpointing. fits is null where no card is known."""

    per_device_train_batch_size: int
    gradient_checkpointing: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    context_bytes: int
    device_bytes: int
    fits: bool | None
    spare_bytes: int | None
    breakdown: Breakdown | None
    moment: str | None


class EstimateOutput(TypedDict):
    """The memory of a training step."""

    model: str
    model_class: str
    assumed: Sequence[Assumption]
    parameters: int
    trainable_parameters: int
    device: str | None
    device_memory_bytes: int | None
    available_bytes: int | None
    precision: Precision
    optim: str
    devices: int
    engine: EngineName | None
    largest_batch: int | None
    largest_batch_with_checkpointing: int | None
    evaluation: EvaluationPeak | None
    rows: Sequence[EstimateRow]
    seconds: float
    notes: Sequence[str]


class OfferOutput(TypedDict):
    """Where the card is rented at, and since when that price is known."""

    provider: str
    product: str
    usd_per_hour: float | None
    vcpus: int | None
    source: str
    date: str | None


class CardRank(TypedDict):
    """How a card stands among those compared."""

    best_for: Sequence[Literal["speed", "cost", "energy"]]
    as_good_for: Sequence[Literal["speed", "cost", "energy"]]
    on_pareto_front: bool
    within_limits: Literal["yes", "close", "no"]
    job_commands: Sequence[str]


class RunOnCard(CardRank):
    """What the whole run takes on a card."""

    card: str
    why_not: str | None
    run_s: float | None
    cost: float | None
    kwh: float | None
    usd_per_million_samples: float | None
    kwh_per_million_samples: float | None
    offer: OfferOutput | None
    assumed: Sequence[Assumption]


class CardTooSmall(RunOnCard):
    """A card on which nothing fits: why_not says why."""

    fits: Literal[False]


class CardPlanned(RunOnCard, ChosenOutput):
    """A card with the settings planned for it, and what they take."""

    effective_batch: int
    changes: Sequence[Change]


CompareOutput = Sequence[CardPlanned | CardTooSmall]


class ChangedKey(TypedDict):
    """null: that file does not say it."""

    key: str
    first: Any
    second: Any


class BothBatches(TypedDict):
    first: int
    second: int


class SideOutput(TypedDict):
    """One config on one card, as it is written."""

    peak_device_bytes: int
    budget_bytes: int
    fits: bool
    samples_per_s: float
    effective_batch: int


class CardDiffOutput(TypedDict):
    card: str
    first: SideOutput
    second: SideOutput
    words: str


class DiffOutput(TypedDict):
    """Two configs on the same cards."""

    keys: Sequence[ChangedKey]
    effective_batch: BothBatches
    cards: Sequence[CardDiffOutput]
    notes: Sequence[str]


# ----------------------------------------------------------------------------------------------------- check and explain


class CheckedProblem(TypedDict):
    """One thing wrong or outdated. repairable: `hfopt check --upgrade` mends it."""

    severity: Literal["error", "warning", "note"]
    code: str
    key: str | None
    place: Place | None
    message: str
    fix: str | None
    repairable: bool


class BatchOutput(TypedDict):
    value: int
    per_device: int
    accumulation: int
    world_size: int


class CheckOutput(TypedDict):
    """A config as it is read, and what is wrong with it; null where several sections leave it open."""

    path: str
    transformers: str
    section: str | None
    trainer: TrainerKind | None
    effective_batch: BatchOutput | None
    arguments: Mapping[str, Any] | None
    model: ModelSpec | None
    data: DataSpec | None
    kept: Sequence[str]
    problems: Sequence[CheckedProblem]


class FiguresOutput(TypedDict):
    """What the message states; null: it does not."""

    requested_bytes: int | None
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    process_bytes: int | None
    others_bytes: int | None
    limit_bytes: int | None
    unused_bytes: int | None


class NothingExplained(TypedDict):
    """No out-of-memory error is in the log; other_fault: what else it shows."""

    found: Literal[False]
    other_fault: str | None


class OomExplained(TypedDict):
    """Why memory ran out, where, and what would have fitted."""

    found: Literal[True]
    source: str
    cause: OomCause
    certain: bool
    fragmentation: bool
    phase: OomPhase
    evidence: str | None
    line: int
    text: str
    device: str | None
    ranks: Sequence[int]
    batch: int | None
    accumulation: int | None
    step: int | None
    went_on: bool
    figures: FiguresOutput
    processes: Mapping[int, int]
    vllm: Mapping[str, float]
    reasons: Sequence[str]
    replay: ReplayedOom | None
    changes: Sequence[FittingChange]
    notes: Sequence[str]


ExplainOutput = OomExplained | NothingExplained
