"""How a batch's loss is made of its samples' losses: the one rule behind accumulation, pieces and the question of neutrality.

Some losses can be had from parts exactly: a sum over items that is divided by the window's `num_items_in_batch` (every part counts 1), and
means over the counted labels (a part counts its share of the labels that are not -100), over the attended tokens, or over the samples.
Which one a model, a label smoother or a custom `compute_loss` has is not read from names: the loss of samples together is compared with
the losses of each. When no rule explains it, the loss compares samples with each other (contrastive, ranking, balanced experts).

The Trainer divides by the accumulation unless it believes that the loss has done so (Trainer.training_step). Where a head ignores the
number of items it is given, n micro-batches make n times the gradient (transformers#47688).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

RuleName = Literal["sum", "counted", "counted_unshifted", "attended", "samples"]
MEANS: tuple[RuleName, ...] = ("counted", "samples", "counted_unshifted", "attended")
IGNORED = -100  # the label that torch.nn.CrossEntropyLoss and every HF head leave out
_NOTICED = 0.25  # of the loss: between a loss that ignores twice the items (0) and one that halves with them (0.5)
_BETWEEN = 0.1  # of the loss: rounding, and masks drawn anew for each group (a contrastive loss of one sample is off by all of it)
REMEDY = "model_accepts_loss_kwargs = False restores them"
"""What a Trainer whose head ignores the number of items is given, so that it divides by the accumulation itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShape:
    """Where the labels are and how exact a loss is."""

    label_name: str | None
    shifted: bool  # a causal model: the first label of a row is never predicted
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    name: RuleName
    settled: bool  # the samples it was tried on left no other rule possible


def counted(inputs: Mapping[str, Any], shape: LossShape, *, shifted: bool) -> int | None:
    """Labels that enter the loss, or None when labels are no class indices."""
    labels = inputs.get(shape.label_name) if shape.label_name else None
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED).sum())


def _share(rule: RuleName, part: Mapping[str, Any], size: int, shape: LossShape) -> int | None:
    if rule == "samples":
        return size
    if rule == "attended":
        mask = part.get("attention_mask")
        return int(mask.sum()) if isinstance(mask, torch.Tensor) else None
    return counted(part, shape, shifted=shape.shifted and rule == "counted")


def weights(rule: RuleName, parts: Sequence[Mapping[str, Any]], sizes: Sequence[int], shape: LossShape) -> list[float]:
    """What each part's loss counts in the whole one; a mean over nothing (weight 0) must not be computed at all."""
    if rule == "sum":
        return [1.0] * len(parts)
    known = [share for part, size in zip(parts, sizes, strict=True) if (share := _share(rule, part, size, shape)) is not None]
    shares: Sequence[int] = known if len(known) == len(parts) and any(known) else sizes
    return [share / sum(shares) for share in shares]


def explains(rule: RuleName, whole: float, losses: Sequence[float], parts: Sequence[Mapping[str, Any]], shape: LossShape) -> bool:
    """Whether the loss of some samples together follows by this rule from the losses of each, within rounding."""
    shares = weights(rule, parts, [1] * len(parts), shape)
    predicted = sum(share * loss for share, loss in zip(shares, losses, strict=True) if share)
    return abs(predicted - whole) <= shape.tolerance * max(abs(whole), *map(abs, losses))


def is_separable(whole: float, one: float, other: float, *, summed: bool) -> bool:
    """The same in the rough, where labels need not be known: any mean of two groups lies between them, a sum is their sum."""
    low, high = (one + other, one + other) if summed else (min(one, other), max(one, other))
    slack = _BETWEEN * max(abs(low), abs(high), abs(whole))
    return low - slack <= whole <= high + slack


def uses_items(once: float, twice: float) -> bool:
    """Whether a loss divides by the number of items it is given: with twice the items it is half of what it was."""
    return once != 0 and twice / once < 1 - _NOTICED


def left_to_the_loss(trainer: Any, *, counts_items: bool) -> bool:
    """Whether the Trainer believes that the loss is divided by the window's items already, and does not divide by the accumulation."""
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)
    if stated is not None:
        return bool(stated)
    return (bool(trainer.model_accepts_loss_kwargs) and counts_items) or getattr(trainer, "compute_loss_func", None) is not None


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Losses that are only looked at: evaluation mode without gradients, each module's own flag put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag
