"""Preference training as TRL does it: pairs in one batch, a reference model beside the policy, and losses that compare.

A sample is a pair (DPO, Reward): n samples are 2n sequences, the chosen ones first. DPO and KTO also run the reference model without
gradients: a frozen second copy of the weights, or with LoRA the same weights with the adapter switched off; none where the answers were
asked for before. What is left out, and said: GRPO's generation, KTO's extra pass for its KL term.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hfopt.errors import WorkloadError

REFERENCE = "reference_model"  # the name under which a recipe attaches it
PAIRED = frozenset({"DPO", "Reward"})
WITH_REFERENCE = frozenset({"DPO", "KTO"})
Loss = Callable[[Any, dict[str, Any]], torch.Tensor]
_BETA = 0.1  # TRL's default; the memory does not depend on it

NOTES = {
    "GRPO": "GRPO: the update is estimated as one of a causal LM; generation and its cache are not in it",
    "KTO": "KTO: the extra pass for the KL term is not in the estimate",
}

BATCH_DEPENDENT = {"KTO": "KTO: the KL term is a mean over the micro-batch, with mismatched pairs made within it"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Batches of pairs: twice as many sequences as samples."""

    single: Callable[[int], dict[str, Any]]
    keep_labels: bool

    def __call__(self, samples: int) -> dict[str, Any]:
        if samples < 1:
            raise WorkloadError(f"a batch of {samples} pairs cannot be made", hint="the smallest batch size is 1")
        batch = self.single(2 * samples)
        return batch if self.keep_labels else {name: tensor for name, tensor in batch.items() if name != "labels"}


def preference_loss(trainer: str, *, asks_reference: bool = True) -> Loss | None:
    """Without asking: the reference's answers came with the samples (precompute_ref_log_probs), a number for each."""
    asked = partial(_ratio, asks_reference=asks_reference)
    losses: dict[str, Loss] = {"DPO": partial(_dpo, ratio=asked), "KTO": partial(_kto, ratio=asked), "Reward": _reward}
    return losses.get(trainer)


def _dpo(model: Any, batch: dict[str, Any], *, ratio: Loss) -> torch.Tensor:
    """-log σ(β·((chosen - rejected) of the policy - the same of the reference))."""
    chosen, rejected = ratio(model, batch).chunk(2)
    return -nn.functional.logsigmoid(_BETA * (chosen - rejected)).mean()


def _kto(model: Any, batch: dict[str, Any], *, ratio: Loss) -> torch.Tensor:
    return (1 - torch.sigmoid(_BETA * ratio(model, batch))).mean()


def _ratio(model: Any, batch: dict[str, Any], *, asks_reference: bool) -> torch.Tensor:
    policy = _sequence_log_probs(model, batch)
    return policy - (_reference_log_probs(model, batch) if asks_reference else torch.zeros_like(policy))


def _reward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """-log σ(reward of the chosen - reward of the rejected)."""
    chosen, rejected = model(**batch).logits.squeeze(-1).chunk(2)
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def _sequence_log_probs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    trained = labels != -100
    picked = torch.gather(logits, -1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((picked - torch.logsumexp(logits, dim=-1)) * trained).sum(-1)


def _reference_log_probs(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    reference = getattr(model, REFERENCE, None)
    if reference is not None:
        reference.eval()
    without_adapter = model.disable_adapter() if reference is None and hasattr(model, "disable_adapter") else nullcontext()
    with torch.no_grad(), without_adapter:
        return _sequence_log_probs(model if reference is None else reference, batch)
