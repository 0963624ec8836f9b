"""Whether a micro-batch's loss can be had from its pieces exactly, and with which weights; found by trying it on two samples.

Some losses can: a sum over items that is divided by the window's `num_items_in_batch` (every piece counts 1), and means over the counted
labels (a piece counts its share of the labels that are not -100), over the attended tokens, or over the samples. Which one a model, a
label smoother or a custom `compute_loss` has is not read from names: the loss of two samples together is compared with the losses of
each. When no rule explains it the loss compares samples with each other (contrastive, ranking, balanced experts) and is refused. What two
samples in evaluation mode cannot show (batch statistics, optimizers that step inside backward) is looked for in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hfopt.oom.split_batch import Inputs, take
from hfopt.oom.step_down import Refusal

RuleName = Literal["sum", "counted", "counted_unshifted", "attended", "samples"]
MEANS: tuple[RuleName, ...] = ("counted", "samples", "counted_unshifted", "attended")
LossOf = Callable[[Inputs], float | None]
IGNORED = -100  # the label that torch.nn.CrossEntropyLoss and every HF head leave out


@dataclass(frozen=True, kw_only=True, slots=True)
class LossShape:
    """Where the labels are and how exact a loss is."""

    label_name: str | None
    shifted: bool  # a causal model: the first label of a row is never predicted
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    name: RuleName
    settled: bool  # the two samples left no other rule possible


def counted(inputs: Inputs, shape: LossShape, *, shifted: bool) -> int | None:
    """Labels that enter the loss, or None when labels are no class indices."""
    labels = inputs.get(shape.label_name) if shape.label_name else None
    if not isinstance(labels, torch.Tensor) or labels.dim() == 0 or labels.is_floating_point():
        return None
    if shifted and labels.dim() > 1:
        labels = labels[..., 1:]
    return int(labels.ne(IGNORED).sum())


def _share(rule: RuleName, piece: Inputs, size: int, shape: LossShape) -> int | None:
    if rule == "samples":
        return size
    if rule == "attended":
        mask = piece.get("attention_mask")
        return int(mask.sum()) if isinstance(mask, torch.Tensor) else None
    return counted(piece, shape, shifted=shape.shifted and rule == "counted")


def weights(rule: RuleName, pieces: Sequence[Inputs], sizes: Sequence[int], shape: LossShape) -> list[float]:
    """What each piece's loss counts in the micro-batch's; a mean over nothing (weight 0) must not be computed at all."""
    if rule == "sum":
        return [1.0] * len(pieces)
    known = [share for piece, size in zip(pieces, sizes, strict=True) if (share := _share(rule, piece, size, shape)) is not None]
    shares: Sequence[int] = known if len(known) == len(pieces) and any(known) else sizes
    return [share / sum(shares) for share in shares]


def find_rule(inputs: Inputs, size: int, shape: LossShape, loss_of: LossOf, expected: Sequence[RuleName]) -> Rule | Refusal:
    """The first of the expected rules that explains the loss of two samples."""
    pair = _two_unlike_samples(inputs, size, shape)
    both = take(inputs, pair, size)
    alone = [take(inputs, [row], size) for row in pair]
    whole, parts = loss_of(both), [loss_of(piece) for piece in alone]
    if whole is None or any(part is None for part in parts):
        return Refusal(name="no_loss", reason="the loss is not one number per micro-batch")
    values = [part for part in parts if part is not None]
    explains = []
    for name in expected:
        shares = weights(name, alone, [1, 1], shape)
        predicted = sum(share * value for share, value in zip(shares, values, strict=True) if share)
        if abs(predicted - whole) <= shape.tolerance * max(abs(whole), *map(abs, values)):
            explains.append(name)
    if not explains:
        return Refusal(
            name="contrastive", reason="the loss of two samples is neither the sum nor the mean of their own losses", batch_bound=True
        )
    return Rule(name=explains[0], settled=len(explains) == 1)


def _two_unlike_samples(inputs: Inputs, size: int, shape: LossShape) -> list[int]:
    """Rows with as different numbers of labels as there are, so that the rules differ most."""
    counts = [counted(take(inputs, [row], size), shape, shifted=shape.shifted) or 0 for row in range(size)]
    few = min((row for row in range(size) if counts[row]), key=lambda row: counts[row], default=0)
    many = max((row for row in range(size) if row != few), key=lambda row: counts[row])
    return sorted([few, many])


def structural_refusal(model: torch.nn.Module, trainer: Any) -> Refusal | None:
    """What makes pieces differ from the whole although their losses add up."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
            return Refusal(name="batch_norm", reason=f"{name} ({type(module).__name__}) takes statistics over the batch", batch_bound=True)
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False):
        return Refusal(name="expert_balance", reason="the balance loss of the experts is taken over the batch", batch_bound=True)
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters()):
        return Refusal(name="step_in_backward", reason="the optimizer steps inside backward, so the weights have moved", batch_bound=True)
    if "lomo" in str(getattr(trainer.args, "optim", "")):
        return Refusal(name="step_in_backward", reason="LOMO steps inside backward, so the weights have moved", batch_bound=True)
    if trainer.args.n_gpu > 1:
        return Refusal(name="data_parallel", reason="torch.nn.DataParallel averages over its replicas; use torchrun")
    return None


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, each module's own flag put back."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:
            module.training = flag
