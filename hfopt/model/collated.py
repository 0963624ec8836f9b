"""Batches from a trainer's own collator, on its longest samples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hfopt.errors import WorkloadError
from hfopt.model.builder import unfaked
from hfopt.model.losses import apart
from hfopt.model.samples import Samples, same_random_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Collated:
    collate: Callable[[list[Any]], Any]
    samples: Samples

    def __call__(self, count: int) -> dict[str, Any]:
        if count < 1:
            raise WorkloadError(f"a batch of {count} samples cannot be made", hint="the smallest batch size is 1")
        with same_random_state(), unfaked():
            return dict(self.collate([copy.copy(sample) for sample in self.samples.batch_of(count)]))


def collator_of(trainer: Any) -> Callable[[list[Any]], Any]:
    """What makes a batch of samples in training: its collator, without the columns the model does not take. Draws leave no trace."""
    from transformers import Trainer

    beside = apart(trainer)
    collate = beside.data_collator
    if type(trainer).get_train_dataloader is Trainer.get_train_dataloader:  # one of its own may remove none (sentence-transformers)
        collate = beside._get_collator_with_removed_columns(collate)

    def collated(samples: list[Any]) -> Any:
        with same_random_state():
            return collate(samples)

    return collated
