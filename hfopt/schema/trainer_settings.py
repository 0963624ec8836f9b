"""What a job's training arguments come to: every value a stage asks for, typed, defaults filled in.

Made by `config.settings.trainer_settings` alone, from the keys of a YAML or of a live `TrainingArguments`. The keys themselves stay in
`TrainJob.raw`, for writing them back and for the reports that quote them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.schema.job import Precision
from hfopt.schema.step_cost import Checkpointing


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
