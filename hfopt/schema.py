"""The frozen values that pass between the stages, in pipeline order.

A stage takes some of these and returns others; none of them does I/O. Unknown is None. Units are in the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
"""How the step computes. fp16 and bf16 are autocast (fp16 with a GradScaler); what the weights are stored in is `ModelSpec.weights_dtype`,
so 'pure bf16' is weights in bfloat16 with precision fp32."""

Task = Literal[
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
    "semantic_segmentation",
    "ctc",
    "speech_seq2seq",
    "audio_classification",
    "embedding",
    "image_text",
    "custom",
]

ALLOWABLE = ("optim", "torch_compile", "use_liger_kernel", "attn_implementation", "accumulation")
"""What a plan changes only where the user allows it."""

# ---------------------------------------------------------------------------------------------- config


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something stands in a file. Lines and columns count from 1, as editors do."""

    path: str
    line: int
    column: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing wrong or outdated in a config."""

    severity: Literal["error", "warning", "note"]
    code: str  # a stable word: unknown_key, removed_key, number_as_string, duplicate_key, ...
    key: str | None
    place: Place | None
    message: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One value that becomes another, and why. `before` is the value in force before, a default included; after=None removes the key."""

    key: str
    before: Any
    after: Any
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    target_modules: tuple[str, ...] | str | None = None  # None: peft's defaults for the architecture; "all-linear" as in peft
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    bits: Literal[4, 8]
    quant_type: str = "nf4"
    double_quant: bool = False
    compute_dtype: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Which model is trained, as the config (or the caller) says it."""

    name: str | None  # Hub id, folder, config.json, or a name of the bundled table
    task: Task | None = None
    weights_dtype: str | None = None  # 'bfloat16' | 'float16' | 'float32' | 'auto'
    attn_implementation: str | None = None
    lora: Lora | None = None
    quantization: Quantization | None = None
    frozen: tuple[str, ...] = ()  # prefixes of modules that do not train
    num_labels: int | None = None
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)  # config attributes set in the YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """What one sample looks like, as the config says it."""

    dataset: str | None = None
    max_length: int | None = None
    max_target_length: int | None = None
    packing: bool = False
    lengths: tuple[int, ...] = ()  # of samples, where batches are padded to their own longest: each for the same share of them
    image_size: int | None = None
    audio_seconds: float | None = None
    samples: int | None = None  # number of training samples, when known


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """A config, read: the arguments of TrainingArguments it sets (right types, current names) and what is trained on what."""

    path: str | None
    section: tuple[str, ...]  # where the arguments stand in the file, () at the root
    trainer: Literal["Trainer", "Seq2SeqTrainer", "SFT", "DPO", "GRPO", "Reward", "KTO"]
    args: Mapping[str, Any]  # only the keys the file sets
    model: ModelSpec
    data: DataSpec
    per_device_batch: int
    accumulation: int
    world_size: int = 1  # data-parallel ranks
    kept: frozenset[str] = frozenset()  # keys the user asked to leave alone

    @property
    def effective_batch(self) -> int:
        return self.per_device_batch * self.accumulation * self.world_size


# ---------------------------------------------------------------------------------------------- hardware


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card: from NVML and the catalog, or from the catalog alone (then uuid, free and driver facts are None)."""

    name: str
    vendor: Literal["nvidia", "amd", "apple"] = "nvidia"
    memory_bytes: int  # what the driver reports as total
    usable_bytes: int | None = None  # what CUDA shows a program as total (cudaMemGetInfo): without the driver's own part
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    sms: int | None = None
    bandwidth_bytes_per_s: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # dense, by 'fp32', 'tf32', 'fp16', 'bf16', 'fp8'
    power_limit_w: float | None = None
    pcie_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None  # total, one direction
    uuid: str | None = None
    index: int | None = None  # the driver's, as nvidia-smi shows it; CUDA's is the place in Hardware.gpus
    mig: bool = False
    catalog_name: str | None = None  # None: not in the catalog, planned by memory only
    source: str | None = None

    @property
    def available_bytes(self) -> int:
        """What a new process can take: what is free now, else what CUDA shows as total, else all of it."""
        return next(size for size in (self.free_bytes, self.usable_bytes, self.memory_bytes) if size is not None)

    def supports(self, precision: Precision) -> bool:
        """bf16 and tf32 need 8.0; fp16 tensor cores came with 7.0, before that fp16 saves memory only."""
        if precision in ("bf16", "tf32"):
            return self.capability is not None and self.capability >= (8, 0)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the card, as far as this process may use it (affinity, cgroup)."""

    cores: float
    ram_bytes: int
    ram_free_bytes: int
    cpu_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    gpus: tuple[Gpu, ...]  # () : the CPU is the device
    host: Host
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: tuple[str, ...] = ()  # what was found odd, for the report
    hypothetical: bool = False  # the card was named, not detected

    @property
    def smallest(self) -> Gpu | None:
        """The card that rules: with several different ones, the one with the least memory."""
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes, default=None)


# ---------------------------------------------------------------------------------------------- workload


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What one batch looks like; the batch size itself is given when it is made."""

    kind: Literal["text", "text_to_text", "image", "audio", "audio_to_text", "image_text", "custom"]
    length: int | None = None  # tokens
    target_length: int | None = None
    height: int | None = None
    width: int | None = None
    channels: int | None = None
    audio_samples: int | None = None
    padded: bool = True  # the attention mask has zeros in it


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSpread:
    """How long the samples are, where each batch is padded to its own longest."""

    longest: int
    lengths: tuple[int, ...]  # each stands for the same share of the samples, ascending
    grouped: bool = False  # a batch is made of samples of like length


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The model and its batches, ready to be built anywhere.

    `build_model()` returns a fresh nn.Module in training mode with adapters, frozen parts and dtypes in place, in the form the calling
    context asks for: inside a FakeTensorMode fake CPU tensors (no weight is ever allocated; other dispatch modes are set aside then and
    see nothing), inside `torch.device("meta")` meta tensors, else real ones with the model's own initialisation. `make_batch(n)` returns a
    dict of CPU tensors for n samples; values of masks and labels matter, so a tracer makes it outside its fake mode, or keeps them.
    `compute_loss(model, batch)` is the Trainer's, or None for `model(**batch).loss`.
    """

    name: str
    model_class: str
    task: Task
    build_model: Callable[[], Any]
    make_batch: Callable[[int], dict[str, Any]]
    shape: BatchShape
    compute_loss: Callable[[Any, dict[str, Any]], Any] | None = None
    parameters: int
    trainable_parameters: int
    layers: int | None = None  # repeated blocks, what every_n_layers counts
    tokens_per_sample: int | None = None
    checkpointable: bool = True
    batch_dependent_loss: str | None = None  # why the loss is not a mean over samples, when it is not
    weights_dtype: str | None = None  # of most trainable weights, when the model itself is at hand
    lengths: LengthSpread | None = None  # None: every batch is as long as `shape` says, or nothing else is known
    with_layers: Callable[[int], Workload | None] | None = None  # the same with another number of blocks; None: cannot be built so
    notes: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------- estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing:
    """every_n_layers=0 is off, 1 is the usual full checkpointing, n > 1 checkpoints each n-th layer (transformers >= 5.22)."""

    every_n_layers: int = 0
    use_reentrant: bool = False

    @property
    def which_layers(self) -> str:
        """'every layer', 'every 2nd layer'."""
        ordinal = {1: "", 2: "2nd ", 3: "3rd "}.get(self.every_n_layers, f"{self.every_n_layers}th ")
        return f"every {ordinal}layer"

    @property
    def on(self) -> bool:
        return self.every_n_layers > 0

    @property
    def words(self) -> str:
        if not self.on:
            return "no checkpointing"
        return "checkpointing" if self.every_n_layers == 1 else f"checkpointing {self.which_layers}"


EngineName = Literal["ddp", "fsdp2", "zero2", "zero3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSizes:
    """DeepSpeed's sizes, in elements; the defaults are DeepSpeed's own, `auto` ones are filled in as transformers does."""

    reduce_bucket: int = 500_000_000
    allgather_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How the data-parallel ranks hold one model: what each has whole, what is divided by `world_size`, what lives in the host's memory."""

    engine: EngineName
    world_size: int
    reshard_after_forward: bool = True  # FSDP2: False keeps gathered weights until the backward is through them
    offload_parameters: bool = False  # sharded weights in the host's memory (FSDP2: with their gradients and optimizer states)
    offload_optimizer: bool = False  # ZeRO: optimizer states and the float32 weights in the host's memory
    sync_each_batch: bool = False  # FSDP2 with accumulation: reduce after each micro-batch instead of keeping whole gradients
    wrap: tuple[str, ...] = ()  # FSDP2: classes of the sharded blocks; () the model's own
    zero: ZeroSizes = ZeroSizes()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Everything but the batch size that changes what one optimizer step allocates and computes."""

    precision: Precision = "fp32"
    checkpointing: Checkpointing = Checkpointing()
    accumulation: int = 1  # only 1 or more than 1 changes the memory
    optim: str = "adamw_torch"
    optim_args: str | None = None
    max_grad_norm: float = 1.0
    label_smoothing: float = 0.0
    attn_implementation: str | None = None
    torch_compile: bool = False
    fused_loss: bool = False  # liger's: head and loss in slices, no logits
    capability: tuple[int, int] = (8, 0)
    multiprocessors: int | None = None  # of the card; reductions split over them
    sharding: Sharding | None = None  # None: one device


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCost:
    """A group of equal kernels of one step; every quantity is affine in the batch: constant + slope × batch."""

    name: str  # aten op
    kind: Literal["matmul", "attention", "conv", "elementwise", "reduction", "embedding", "optimizer", "copy", "other"]
    dtype: str
    phase: Literal["forward", "backward", "optimizer"]
    count: float  # how many such kernels in one micro-batch (or one optimizer step for phase optimizer)
    flops_constant: float
    flops_slope: float
    bytes_constant: float
    bytes_slope: float
    shape: tuple[tuple[int, int], ...] = ()  # matmul: (m, n, k, batch) each as (constant, slope)


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Where the bytes of the peak are; the fields add up to the device's peak exactly."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    temporaries_bytes: int
    fragmentation_bytes: int  # reserved - allocated, and what rounding adds
    context_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.temporaries_bytes
            + self.fragmentation_bytes
            + self.context_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Predicted memory of one configuration at one batch size."""

    batch: int
    allocated_bytes: int
    reserved_bytes: int  # the allocator's, without the context
    context_bytes: int
    breakdown: Breakdown | None = None
    moment: str | None = None  # which phase, module and op the peak falls in

    @property
    def device_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One line of `hfopt estimate`."""

    peak: MemoryPeak
    checkpointing: Checkpointing
    fits: bool | None  # None: no card was named
    spare_bytes: int | None  # negative: missing
    asked: bool = False  # the batch and checkpointing of the config itself


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryTable:
    """What `hfopt estimate` says: the memory of one step by batch size and checkpointing."""

    model: str
    model_class: str
    parameters: int
    trainable_parameters: int
    device: Gpu | None
    available_bytes: int | None  # what the card has for this process
    settings: StepSettings  # as the config has them
    sample: str | None  # '512 tokens', '224 × 224 pixels'
    rows: tuple[MemoryRow, ...]
    largest: Mapping[bool, int | None]  # by checkpointing: the largest batch that fits
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def largest_batch(self) -> int | None:
        """With the config's own checkpointing."""
        return self.largest.get(self.settings.checkpointing.on)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Predicted time of one optimizer step (all micro-batches of the accumulation)."""

    step_s: float
    busy_s: float  # the GPU runs a kernel
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    bound: Literal["compute", "bandwidth", "launch", "communication", "input"]
    shares: Mapping[str, float] = field(default_factory=dict)  # by kind of op, of step_s

    @property
    def gpu_utilization(self) -> float:
        return self.busy_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderPlan:
    """How the data is fed."""

    workers: int
    prefetch_factor: int | None  # None with 0 workers
    pin_memory: bool
    persistent_workers: bool
    sample_s: float  # cost of one sample on one core
    busy_share: float = 1.0  # of that time the core is busy; the rest it waits
    measured: bool  # False: from the table by modality
    reason: str


# ---------------------------------------------------------------------------------------------- search


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One point of the search space. The effective batch is batch × accumulation × world and is the same for all of them."""

    per_device_batch: int
    accumulation: int
    precision: Precision
    checkpointing: Checkpointing = Checkpointing()
    optim: str | None = None  # None: as the config has it
    attn_implementation: str | None = None
    torch_compile: bool = False
    use_liger_kernel: bool = False


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


# ---------------------------------------------------------------------------------------------- verify


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


# ---------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The settings before or after, priced."""

    candidate: Candidate
    memory: MemoryPeak
    time: StepTime
    loader: LoaderPlan
    fits: bool


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
    notes: tuple[str, ...] = ()
    engine: EngineChoice | None = None  # None: one device


# ---------------------------------------------------------------------------------------------- charts


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
    keeps_effective_batch: bool = False  # an exact divisor: only these can be chosen
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


# ---------------------------------------------------------------------------------------------- run time


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLag:
    """How much later than the others one rank comes to the points where they wait for each other, per step."""

    rank: int
    lag_s: float
    step_s: float
    where: Literal["after backward", "data", "before forward", "forward"]


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
    lags: tuple[RankLag, ...] = ()
    context_bytes: int | None = None  # of the CUDA context, when known


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


MemoryModel = Callable[[Candidate], MemoryPeak]
TimeModel = Callable[[Candidate], StepTime]
Batches = Sequence[int]
