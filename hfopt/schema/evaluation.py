"""The evaluations during training: how the Trainer runs them, what the first one takes, and the table that shows it beside the steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hfopt.schema.hardware import Gpu
from hfopt.schema.job import Assumption
from hfopt.schema.step_cost import MemoryPeak, MemoryRow, StepSettings


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
