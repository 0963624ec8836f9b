"""ZeRO-3's linear layers: DeepSpeed puts a function of its own in the place of `torch.nn.functional.linear`.

It (deepspeed/runtime/zero/linear.py) keeps the input for the backward whether the weight trains or not, where torch keeps it only for
a weight that does: under LoRA each frozen layer's input stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        made = values.matmul(weight.t())
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_values, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_values else None,
            rows.t().matmul(values.reshape(-1, values.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@contextlib.contextmanager
def inputs_kept() -> Iterator[None]:
    """While this is open, linear layers are DeepSpeed's."""
    usual = torch.nn.functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = _Linear.apply(input, weight, bias)
        return made

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = usual
