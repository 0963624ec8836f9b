"""Does trading batch for accumulation leave a live Trainer's gradients alone? Asked of its own loss, on its own model and samples.

Two questions, each a few forward passes without gradients. Does the loss use the number of items it is given (then it is a sum over the
window, and the Trainer must not divide by the accumulation), or is it a mean (then the Trainer must)? And is the loss of two groups of
samples together one between the losses of each (any mean over samples or tokens is), or does it compare samples with each other?
Limits: means over unequal numbers of tokens are weighted by the micro-batch they fall in, as in any framework.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import torch

from hfopt.errors import WorkloadError
from hfopt.facts.loss_rule import REMEDY, evaluating, is_separable, left_to_the_loss, uses_items
from hfopt.model.from_trainer import copies_of
from hfopt.model.losses import apart, loss_of
from hfopt.model.samples import collator_of, readable_samples, same_random_state
from hfopt.probe.neutrality import shrink
from hfopt.schema import Neutrality

_FAILURES = (WorkloadError, AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What a loss may raise on fewer samples than it was made for; then there is no answer."""
_MOST_PARAMETERS = 200_000_000  # of a copy: a few forward passes of that on the CPU take seconds
_OF_THE_DATA = frozenset(
    {"vocab_size", "max_position_embeddings", "n_positions", "image_size", "num_channels", "id2label", "label2id", "problem_type"}
)


def probe_live(trainer: Any) -> Neutrality | None:
    """None: the loss could not be asked."""
    import transformers

    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    name = type(base).__name__
    answer = _asked(trainer, base)
    if answer is None:
        return None
    uses, separable, counts_items = answer
    scaled = left_to_the_loss(trainer, counts_items=counts_items)
    accumulation = max(2, int(trainer.args.gradient_accumulation_steps))
    neutral = separable and uses == scaled
    ratio = 1.0 if uses == scaled else float(accumulation) if scaled else 1.0 / accumulation
    fixable = separable and not uses and scaled and getattr(trainer, "compute_loss_func", None) is None
    return Neutrality(
        model_class=name,
        transformers_version=transformers.__version__,
        neutral=neutral,
        ratio=ratio,
        fixable=fixable and getattr(trainer, "loss_is_scaled_for_ga", None) is None,
        reason=_reason(name, uses=uses, scaled=scaled, separable=separable),
    )


def _asked(trainer: Any, base: Any) -> tuple[bool, bool, bool] | None:
    """Uses the items, is separable, is given items at all."""
    try:
        model = _stand_in(trainer, base) if _means_nothing(trainer.model) else trainer.model
        with same_random_state(), evaluating(model):
            asked = _Asked(trainer, model)
            uses, separable = asked.uses_items(), asked.is_separable()
    except _FAILURES:
        return None
    return None if uses is None or separable is None else (uses, separable, asked.counts_items)


def _means_nothing(model: torch.nn.Module) -> bool:
    """The virtual GPU's numbers do not, and what is asked there would be counted as the script's own memory: a copy on the CPU answers."""
    return "HFOPT_VIRTUAL_STATE" in os.environ and bool(next(model.parameters()).is_cuda)


def _stand_in(trainer: Any, base: Any) -> torch.nn.Module:
    """The model itself, or a tiny one of its class that takes the same samples: what its loss does is not a matter of size."""
    if sum(parameter.numel() for parameter in trainer.model.parameters()) <= _MOST_PARAMETERS:
        return _noise(copies_of(trainer)())
    fields = base.config.to_dict()
    of_the_data = {key: value for key, value in fields.items() if key in _OF_THE_DATA or key.endswith("_token_id")}
    config = type(base.config).from_dict({**shrink(fields), **of_the_data})
    return _noise(type(base)(config))


def _noise(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad(), same_random_state():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
    return model


class _Asked:
    """The live Trainer's loss as a function of samples and the number of items."""

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        self._beside = apart(trainer)
        self._model = model
        self._collate = collator_of(trainer)
        self._data = readable_samples(trainer.train_dataset)
        self._device = next(model.parameters()).device
        self.counts_items = "labels" in self._batch([0]) and (
            bool(trainer.model_accepts_loss_kwargs) or getattr(trainer, "compute_loss_func", None) is not None
        )

    def uses_items(self) -> bool | None:
        """Twice the items, half the loss."""
        if not self.counts_items:
            return False
        for rows in self._groups():
            once, twice = self._loss(rows, items=64), self._loss(rows, items=128)
            if math.isfinite(once) and once:
                return uses_items(once, twice)
        return None

    def is_separable(self) -> bool | None:
        for rows in self._groups():
            other = [(row + len(self._data) // 2) % len(self._data) for row in rows]
            items = 64 if self.uses_items() else None
            one, two, whole = (self._loss(group, items) for group in (rows, other, [*rows, *other]))
            if all(map(math.isfinite, (one, two, whole))):
                return is_separable(whole, one, two, summed=items is not None)
        return None

    def _groups(self) -> Iterator[list[int]]:
        """One sample is enough; more where that one has nothing to learn (no masked token)."""
        for size in (1, 4, 16):
            if 2 * size <= len(self._data) or size == 1:
                yield list(range(size))

    def _batch(self, rows: list[int]) -> dict[str, Any]:
        return dict(self._collate([self._data[row] for row in rows]))

    def _loss(self, rows: list[int], items: int | None = None) -> float:
        inputs = {name: _moved(value, self._device) for name, value in self._batch(rows).items()}
        count = None if items is None else torch.tensor(items, device=self._device)
        with self._beside.compute_loss_context_manager():
            return float(loss_of(self._beside, self._model, inputs, num_items_in_batch=count))


def _reason(name: str, *, uses: bool, scaled: bool, separable: bool) -> str:
    if not separable:
        return f"{name}: the loss of two groups of samples together is no mean of their own: it depends on the batch"
    if uses == scaled:
        return f"{name}: the loss is a {'sum over the window' if uses else 'mean, divided by the Trainer'}"
    if scaled:
        return (
            f"{name}: the loss ignores num_items_in_batch and the Trainer leaves the division to it, so gradients grow with the "
            f"accumulation; {REMEDY}"
        )
    return f"{name}: the loss is divided twice, by the number of items and by the accumulation"


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value
