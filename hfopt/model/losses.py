"""Losses that the model does not compute itself, and why a loss is not a mean over samples when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hfopt.schema import Task

Loss = Callable[[Any, dict[str, Any]], Any]


def loss_for(task: Task) -> Loss | None:
    return in_batch_negatives if task == "embedding" else None


def in_batch_negatives(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The contrastive loss embedding models are mostly trained with: each anchor against every positive of the batch.

    Anchors and positives are two forward passes; mean pooling over real tokens, cosine similarity × 20, cross-entropy
    (sentence-transformers' MultipleNegativesRankingLoss). The n × n scores grow with the square of the batch.
    """
    anchors = {name: tensor for name, tensor in batch.items() if not name.startswith("positive_")}
    positives = {name.removeprefix("positive_"): tensor for name, tensor in batch.items() if name.startswith("positive_")}
    first, second = (_pooled(model, inputs) for inputs in (anchors, positives))
    scores = 20 * first @ second.T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _pooled(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    hidden = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
    return nn.functional.normalize(mean, dim=-1)


def why_batch_dependent(model: nn.Module, task: Task, accepts: frozenset[str]) -> str | None:
    """A reason why two half batches do not give the gradient of the whole one, or None."""
    if task == "embedding":
        return "contrastive: each sample is compared with the others of its batch"
    if "return_loss" in accepts:
        return "contrastive: each image is compared with the texts of its batch"
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and any(p.requires_grad for p in module.parameters()):
            return f"{name} normalises over the batch ({type(module).__name__})"
    return None
