"""Liger's fused linear cross entropy in plain operations, for the trace: the head and the loss in slices, so the logits never exist whole.

As liger-kernel does it (ops/fused_linear_cross_entropy.py): the tokens are cut into slices whose logits take about as much as the hidden
states; each slice's logits become their own gradient in place, and the gradients of hidden states and weight are made in the forward.
Liger rounds a slice up to a power of two, so it is at most twice as long: that upper bound is traced. Its other kernels (norms, rotary
embedding, gated units) are left as they are, so what they save comes on top of the estimate.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


def fuse_loss(model: Any) -> bool:
    """Puts it into a causal language model; False where the head is not a plain one, and then nothing was changed."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    name = next((name for name, child in base.named_children() if child is head), None)
    if name is None or type(head) is not nn.Linear:
        return False
    setattr(base, name, _PassThrough(head))
    base.loss_function = functools.partial(_loss, head)
    forward = base.forward

    @functools.wraps(forward)
    def without_logits(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return type(outputs)(loss=outputs.loss)

    base.forward = without_logits
    return True


class _PassThrough(nn.Module):  # type: ignore[misc]
    """Holds the head's parameters in their place and leaves the hidden states as they are."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def _loss(head: nn.Linear, logits: torch.Tensor, labels: torch.Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any) -> torch.Tensor:
    """transformers hands over what the head returned, which are the hidden states here."""
    hidden = logits.reshape(-1, logits.shape[-1])
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    loss: torch.Tensor = _FusedLinearCrossEntropy.apply(hidden, head.weight, targets)
    return loss / num_items_in_batch if num_items_in_batch is not None else loss


class _FusedLinearCrossEntropy(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        tokens, width = hidden.shape
        slices = max(1, -(-weight.shape[0] // width) // 2)
        rows = -(-tokens // slices)
        hidden_gradient = torch.zeros_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=hidden.device)
        for index in range(slices):
            start = min(index * rows, tokens - rows)
            part = hidden[start : start + rows]
            logits = part @ weight.t()
            logits.exp_()  # one kernel reads the slice and writes its gradient over it
            hidden_gradient[start : start + rows] = logits @ weight
            if weight_gradient is not None:
                weight_gradient += logits.t() @ part
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        hidden_gradient.mul_(grad)
        return hidden_gradient, weight_gradient, None
