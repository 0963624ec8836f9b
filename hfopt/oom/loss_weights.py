"""Whether a micro-batch may be cut into pieces without changing the training: its loss is tried on two samples, its model is looked at.

The rules are those of `facts.loss_rule`. What two samples in evaluation mode cannot show (batch statistics, optimizers that step inside
backward) is looked for in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hfopt.facts.loss_rule import LossShape, Rule, RuleName, counted, explains, over_the_batch
from hfopt.oom.split_batch import Inputs, take
from hfopt.oom.step_down import Refusal

LossOf = Callable[[Inputs], float | None]


def find_rule(inputs: Inputs, size: int, shape: LossShape, loss_of: LossOf, expected: Sequence[RuleName]) -> Rule | Refusal:
    """The first of the expected rules that explains the loss of two samples."""
    pair = _two_unlike_samples(inputs, size, shape)
    both = take(inputs, pair, size)
    alone = [take(inputs, [row], size) for row in pair]
    whole, losses = loss_of(both), [loss_of(piece) for piece in alone]
    values = [loss for loss in losses if loss is not None]
    if whole is None or len(values) < len(losses):
        return Refusal(name="no_loss", reason="the loss is not one number per micro-batch")
    possible = [name for name in expected if explains(name, whole, values, alone, shape)]
    if not possible:
        return Refusal(
            name="contrastive", reason="the loss of two samples is neither the sum nor the mean of their own losses", batch_bound=True
        )
    return Rule(name=possible[0], settled=len(possible) == 1)


def _two_unlike_samples(inputs: Inputs, size: int, shape: LossShape) -> list[int]:
    """Rows with as different numbers of labels as there are, so that the rules differ most."""
    counts = [counted(take(inputs, [row], size), shape, shifted=shape.shifted) or 0 for row in range(size)]
    few = min((row for row in range(size) if counts[row]), key=lambda row: counts[row], default=0)
    many = max((row for row in range(size) if row != few), key=lambda row: counts[row])
    return sorted([few, many])


def structural_refusal(model: torch.nn.Module, trainer: Any) -> Refusal | None:
    """What makes pieces differ from the whole although their losses add up."""
    for name, module in over_the_batch(model):
        if module.training:
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
