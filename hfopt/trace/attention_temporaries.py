"""What CUDA's fused attention kernels take besides their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hfopt.trace.formulas import constant, round_up
from hfopt.trace.kernels import Kernels, Step

_HALF = (torch.float16, torch.bfloat16)


def flash_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """flash_attn/flash_api.cpp, mha_bwd: softmax sums and a float32 gradient of the query, padded; grouped heads are expanded first."""
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = round_up(length, 128)
    padded = round_up(width, 32) if width <= 128 else 192 if width <= 192 else 256
    steps: list[Step] = [*out[:3], constant(batch * heads * rows * 4), constant(batch * heads * rows * padded * 4)]
    if key.shape[1] != heads:
        expanded = constant(batch * heads * key.shape[2] * width * query.element_size())
        steps += [expanded, expanded]
    return steps


def efficient_forward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """transformers/cuda/attention.cu, _efficient_attention_forward: wide heads in half precision accumulate in a float32 buffer."""
    output, logsumexp, seed, offset = out
    steps: list[Step] = [seed, offset, output, logsumexp]
    if output.dtype in _HALF and args[2].shape[-1] > 128:
        steps.append(constant(output.numel() * 4))
    return [step for step in steps if not isinstance(step, torch.Tensor) or step.numel()]


def efficient_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """transformers/cuda/attention_backward.cu: delta, then the workspace of mem_eff_attention/kernel_backward.h."""
    gradient, query, key = args[0], args[1], args[2]
    batch, heads, length, width = query.shape
    sums = constant(batch * heads * length * 4)
    steps: list[Step] = [tensor for tensor in out if isinstance(tensor, torch.Tensor)]
    if query.dtype in _HALF:
        steps.append(sums)
    else:  # delta = (grad * out).sum(-1) as three operations
        steps += [constant(gradient.numel() * 4), sums, sums, 0, 1]
    rows, columns, accumulates = _backward_tile(query.dtype in _HALF, width, kernels.capability)
    tile = (rows * columns * 4 + 16) * -(-width // columns)
    extra = 2 * round_up(key.shape[2], 64) * round_up(width, rows) * 4 if accumulates else 0
    return [*steps, constant(batch * heads * (-(-length // rows) * tile + extra))]


def _backward_tile(half: bool, width: int, capability: tuple[int, int]) -> tuple[int, int, bool]:
    """Rows and columns of the kernel's tile, and whether keys and values accumulate outside registers: a matter of shared memory."""
    if width <= 64:
        return 64, 64, False
    roomy = capability in ((8, 0), (9, 0), (10, 0))
    if not half:
        return (128, 64, False) if roomy else (64, 64, False)
    if width <= 128 and roomy:
        return 128, 128, False
    if width <= 96:
        return 128, 64, False
    return (64, 64, True) if width <= 128 else (128, 64, True)
