"""A config as it was read: the job it describes, its typed settings, its problems with their places, and what a plan changes in it.

`TrainerSettings` is what a job's training arguments come to: every value a stage asks for, typed, defaults filled in. It is made by
`config.settings.trainer_settings` alone, from the keys of a YAML or of a live `TrainingArguments`. The keys themselves stay in
`TrainJob.raw`, for writing them back and for the reports that quote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hfopt.compat.versions import is_at_least

if TYPE_CHECKING:
    from hfopt.schema.step_cost import Checkpointing

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
"""How the step computes. fp16 and bf16 are autocast (fp16 with a GradScaler); what the weights are stored in is `ModelSpec.weights_dtype`,
so 'pure bf16' is weights in bfloat16 with precision fp32."""

_UNSCALABLE = {
    "bfloat16": "PyTorch has no kernel to unscale bfloat16 gradients (NotImplementedError at the first step)",
    "float16": "PyTorch refuses to unscale float16 gradients (ValueError at the first step)",
}
"""Types of gradients that a GradScaler cannot take: torch/amp/grad_scaler.py and _amp_foreach_non_finite_check_and_unscale_."""


def why_not_scaled(stored: str | None) -> str | None:
    """Why fp16 cannot train weights stored so; None where it can."""
    return None if stored not in _UNSCALABLE else f"fp16: true cannot train weights stored in {stored}: {_UNSCALABLE[stored]}"


Task = Literal[
    "causal_lm",
    "masked_lm",
    "seq2seq_lm",
    "sequence_classification",
    "token_classification",
    "question_answering",
    "image_classification",
    "semantic_segmentation",
    "object_detection",
    "video_classification",
    "time_series",
    "ctc",
    "speech_seq2seq",
    "audio_classification",
    "embedding",
    "image_text",
    "custom",
]

TrainerKind = Literal["Trainer", "Seq2SeqTrainer", "SFT", "DPO", "GRPO", "RLOO", "Reward", "KTO", "ORPO", "CPO"]
GENERATING: frozenset[TrainerKind] = frozenset({"GRPO", "RLOO"})
"""Trainers that write the samples they learn from."""

ModelPart = Literal["vision", "projector", "language"]

ALLOWABLE = ("optim", "torch_compile", "use_liger_kernel", "attn_implementation", "accumulation")
"""What a plan changes only where the user allows it."""


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
class Assumption:
    """One part of the picture of the job that a plan rests on: read, or guessed where nothing says it."""

    what: str  # head, labels, length, weights, attention, adapter, data size, host, ...
    value: str | None  # None: not known, and nothing was put in its place
    guessed: bool = False
    settle: str | None = None  # the flag or key that says it


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
    scales_loss: bool = False  # a GradScaler stands between its gradients and the optimizer, and it trains whole
    loads_itself: bool = False  # a script of the user's own makes the model: an unstated dtype is its affair
    attn_implementation: str | None = None
    lora: Lora | None = None
    guessed_adapter: bool = False  # what the file says of it leaves its size open
    quantization: Quantization | None = None
    frozen: tuple[str, ...] = ()  # prefixes of modules that do not train
    frozen_parts: tuple[ModelPart, ...] = ()  # of a model of several, that do not train
    num_labels: int | None = None
    reference: bool | None = None  # a frozen copy beside it, asked in every step; None: as its trainer usually does
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)  # config attributes set in the YAML
    last_layers: int | None = None  # these alone train; below zero the first ones
    stands_for: str | None = None  # the adapter of another kind that `lora` is planned for
    widens_trained: bool = False  # what trains is made float32, the rest stays
    notes: tuple[str, ...] = ()  # what of its tuning was planned by something close
    float32_modules: tuple[str, ...] = ()  # parts of their names: kept in float32 whatever the other weights are stored in
    beyond: str | None = None  # why a step of this model alone says nothing of the job: it is refused
    like: str | None = None  # the known model whose architecture it has, where its own config is not to be found

    def stored_in(self, checkpoint: object) -> str:
        """As from_pretrained does: the stated dtype; unstated or 'auto' is the checkpoint's from transformers 5 on, float32 before.
        Unstated float16 that a GradScaler would refuse at the first step is taken to be loaded in float32."""
        stated = self.weights_dtype
        if stated is None and (self.widened(checkpoint) or not is_at_least("transformers", "5")):
            return "float32"
        return str((checkpoint or "float32") if stated in (None, "auto") else stated).removeprefix("torch.")

    def widened(self, checkpoint: object) -> bool:
        return self.weights_dtype is None and self.scales_loss and str(checkpoint).removeprefix("torch.") == "float16"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """What one sample looks like, as the config says it."""

    dataset: str | None = None
    max_length: int | None = None
    max_target_length: int | None = None
    target_follows: bool = False  # the target is stated beside the source: a decoder alone reads both in one sequence
    packing: bool = False
    lengths: tuple[int, ...] = ()  # of samples, where batches are padded to their own longest: each for the same share of them
    image_size: int | None = None
    images_per_sample: int | None = None
    min_pixels: int | None = None  # the image processor's limits
    max_pixels: int | None = None
    edges: Mapping[str, int] | None = None  # the image processor's `size`, such as {"shortest_edge": 800, "longest_edge": 1333}
    frames: int | None = None  # of a video
    audio_seconds: float | None = None
    samples: int | None = None  # number of training samples, when known
    samples_at_most: bool = False  # that number is a limit the file sets: there may be fewer
    assumed: tuple[Assumption, ...] = ()  # lengths that the reader put together from others


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """What a config, or a live Trainer, says of the evaluations beside the training arguments."""

    samples: int | None = None  # over all ranks
    computes_metrics: bool | None = None  # compute_metrics is given to the Trainer; None: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """A config, read: the arguments of TrainingArguments it sets (right types, current names) and what is trained on what."""

    path: str | None
    section: tuple[str, ...]  # where the arguments stand in the file, () at the root
    trainer: TrainerKind
    raw: Mapping[str, Any]  # only the keys the file sets: for writing them back; what they mean is in `settings`
    settings: TrainerSettings
    model: ModelSpec
    data: DataSpec
    per_device_batch: int
    accumulation: int
    world_size: int = 1  # data-parallel ranks
    for_transformers: str | None = None  # the version that will read the file; None: the installed one
    uses_trl: bool = False  # TRL's own trainer, not another tool's of the same kind
    guessed_trainer: bool = False  # nothing in the file names it: a section, the path or a preference loss does
    own_script: bool = False  # it has keys that the parser of `trl` does not take: another program reads it
    tool: str | None = None  # whose file it is, where it is no file of transformers or TRL
    kept: frozenset[str] = frozenset()  # keys the user asked to leave alone
    unwritable: frozenset[str] = frozenset()  # arguments that the file's tool has no key for
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)

    @property
    def generates(self) -> bool:
        """Its trainer writes the samples it trains on."""
        return self.trainer in GENERATING

    @property
    def fixed(self) -> frozenset[str]:
        """What a plan must not change."""
        return self.kept | self.unwritable

    @property
    def effective_batch(self) -> int:
        return self.per_device_batch * self.accumulation * self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """The training DataLoader."""

    workers: int
    prefetch_factor: int | None  # None without workers
    pin_memory: bool
    persistent_workers: bool
    groups_by_length: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationArguments:
    """How the Trainer evaluates while it trains."""

    runs: bool
    batch: int
    accumulation_steps: int | None
    loss_only: bool
    batchwise_metrics: bool
    concatenates: bool
    best_metric: str | None
    generates: bool  # predict_with_generate
    generation_max_length: int | None
    generation_beams: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What shares the job over several devices; a DeepSpeed or FSDP config may be the path of a file."""

    deepspeed: str | Mapping[str, Any] | None
    fsdp: tuple[str, ...] | None  # its options; None: off. `fsdp_config` alone switches nothing on
    fsdp_config: str | Mapping[str, Any] | None
    sync_each_batch: bool
    model_parallel: int  # ranks that share their samples, as the arguments state them
    ddp_backend: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """How GRPO and RLOO write the completions they learn from."""

    generations: int | None  # completions of one prompt
    batch: int | None  # generation_batch_size
    steps: int | None  # steps_per_generation
    uses_vllm: bool
    vllm_mode: str
    vllm_share: float  # of the card
    states_vllm_mode: bool
    states_vllm_share: bool
    vllm_sleeps: bool
    vllm_tensor_parallel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """One job's settings beside its batch and accumulation, which a plan trades and `TrainJob` holds."""

    precision: Precision
    checkpointing: Checkpointing
    checkpointing_when_on: Checkpointing  # what switching it on would give
    optim: str
    optim_args: str | None
    max_grad_norm: float
    label_smoothing: float
    torch_compile: bool
    compile_mode: str  # "default", "reduce-overhead", …
    compile_backend: str
    liger: bool
    loss_type: str | None  # TRL's
    learning_rate: float
    max_steps: int | None  # None: epochs decide
    epochs: float
    use_cpu: bool
    loader: LoaderSettings
    evaluation: EvaluationArguments
    engine: EngineSettings
    rollout: RolloutSettings
