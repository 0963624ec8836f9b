"""What a step takes: memory at every batch size, time, what the loader must bring; and what an evaluation takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from hfopt.schema.job import Assumption, Precision
from hfopt.schema.workload import Gpu


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
    divides_gradients: bool = True  # stages 2 and 3; stage 1 keeps whole ones until the last micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How the data-parallel ranks hold one model: what each has whole, what is divided by `world_size`, what lives in the host's memory."""

    engine: EngineName
    world_size: int
    reshard_after_forward: bool = True  # FSDP2: False keeps gathered weights until the backward is through them
    offload_parameters: bool = False  # sharded weights in the host's memory (FSDP2: with their gradients and optimizer states)
    offload_optimizer: bool = False  # ZeRO: optimizer states and the float32 weights in the host's memory
    recomputes: bool = False  # FSDP2: checkpointing of all layers is accelerate's, inside the sharded blocks, in place of the Trainer's
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
    compile_mode: str = "default"
    fused_loss: bool = False  # liger's kernels: head and loss in slices, no logits
    capability: tuple[int, int] = (8, 0)
    multiprocessors: int | None = None  # of the card; reductions split over them
    sharding: Sharding | None = None  # None: one device
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF; None: PyTorch's defaults

    @property
    def mixed(self) -> bool:
        return self.precision in ("bf16", "fp16")

    @property
    def sharding_recomputes(self) -> bool:
        """FSDP2's own checkpointing knows no grades: with every n-th layer it is the Trainer's."""
        return self.checkpointing.every_n_layers == 1 and self.sharding is not None and self.sharding.recomputes

    @property
    def eager(self) -> StepSettings:
        return replace(self, torch_compile=False, compile_mode="default")

    @property
    def words(self) -> str:
        """What tells one trace from another."""
        parts: list[str] = [self.precision]
        if self.checkpointing.on:
            parts.append(f"checkpointing {self.checkpointing.which_layers}")
        if self.accumulation > 1:
            parts.append("accumulation")
        if self.fused_loss:
            parts.append("fused loss")
        if self.attn_implementation is not None:
            parts.append(self.attn_implementation)
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledStep:
    """What compiling a step takes, and what came out of it."""

    compile_s: float  # of one core here: Dynamo, AOTAutograd and Inductor, without Triton's work on the kernels
    graphs: int  # that a run compiles until its shapes repeat
    graph_breaks: int
    kernels: int  # that Inductor wrote, each counted once
    launches: float  # of one forward and backward, torch's own kernels included
    eager_launches: float  # the same before
    mode: str = "default"
    uncollected: tuple[float, float] = (0.0, 0.0)  # bytes that only Python's cycle collector gives back: constant, slope over the batch

    def uncollected_bytes(self, batch: int) -> int:
        constant, slope = self.uncollected
        return max(0, round(constant + slope * batch))


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
class MemoryPhase:
    """One phase of a step that generates with vLLM on the same card: what the training holds in it, and what vLLM does."""

    name: str
    training_bytes: int
    vllm_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.training_bytes + self.vllm_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """One line of `hfopt estimate`."""

    peak: MemoryPeak
    checkpointing: Checkpointing
    fits: bool | None  # None: no card was named
    spare_bytes: int | None  # negative: missing
    asked: bool = False  # the batch and checkpointing of the config itself


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
    clock_share: float | None = None  # of the clock the peaks are quoted at, sustained; None: nothing is known of the board's power
    power_w: float | None = None  # average over the step, of one card
    rate_error: float | None = None  # eight of ten rates predicted so were within this share of the measured one; None: not known

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSettings:
    """How `predict_with_generate` writes."""

    max_length: int  # of what is written; with the prompt for a model without an encoder
    beams: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """How the Trainer evaluates. `keeps_predictions`: for compute_metrics, unless prediction_loss_only is set."""

    samples: int  # over all ranks
    keeps_predictions: bool = True
    accumulation_steps: int | None = None
    concatenates: bool = True  # eval_do_concat_batches
    generation: GenerationSettings | None = None
    world_size: int = 1

    def kept_batches(self, batch: int) -> int:
        """The most batches whose predictions are on the card at once."""
        if not self.keeps_predictions:
            return 0
        batches = -(-self.samples // (batch * self.world_size))
        return min(batches, self.accumulation_steps or batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPeak:
    """The first evaluation at one batch size: what it takes on the card, and whether that fits."""

    batch: int
    accumulation_steps: int | None
    keeps_predictions: bool
    memory: MemoryPeak  # reserved: as far as the card lets the allocator keep what is freed
    kept_bytes_per_sample: int  # what each sample leaves on the card until it is moved to the host
    fits: bool


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
    assumed: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    evaluation: EvaluationPeak | None = None  # the first one, where the config evaluates

    @property
    def largest_batch(self) -> int | None:
        """With the config's own checkpointing."""
        return self.largest.get(self.settings.checkpointing.on)
