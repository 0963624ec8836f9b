"""What CUDA kernels take besides their outputs, and in which order: the part of memory the dispatcher never shows.

Each entry mirrors one C++ file of PyTorch. An operation's allocations are a list of steps: an output tensor, or a `Formula` for a
temporary that is returned when the operation ends. A formula keeps its dimensions, each affine in the batch, because its size may not be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hfopt.units import KIB, MIB

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Formula:
    """A size that `FORMULAS[name]` computes from dimensions; each dimension is affine in the batch."""

    name: str
    dims: tuple[int, ...]

    def bytes(self) -> int:
        return FORMULAS[self.name](*self.dims)


Step: TypeAlias = torch.Tensor | Formula


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _embedding_partials(tokens: int, rows: int, width: int) -> int:
    """grad_weight_per_segment of EmbeddingBackwardKernel.cu: float32, one row per partial segment at most."""
    if tokens <= 3072:
        return 0
    return (tokens // 10 + min(tokens, rows)) * _round_up(width, 32) * 4


FORMULAS: dict[str, Callable[..., int]] = {
    "bytes": lambda size: size,
    "embedding_partials": _embedding_partials,
}


def constant(size: int) -> Formula:
    return Formula("bytes", (size,))


class Kernels:
    """The allocation order of CUDA's kernels for one capability and one version of PyTorch."""

    def __init__(self, *, capability: tuple[int, int] = (8, 0), workspace_per_call: bool = True) -> None:
        self.capability = capability
        # ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize: 32 MiB on sm_90 and later, else 4096 KiB × 2 + 16 KiB × 8
        self.cublas_bytes = 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB
        self.workspace_per_call = workspace_per_call

    def order(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step] | None:
        """The steps of one operation, or None: its outputs in order and nothing else."""
        rule = _RULES.get(func)
        return None if rule is None else rule(self, args, kwargs, out)

    def workspace(self) -> list[Step]:
        return [constant(self.cublas_bytes)] if self.workspace_per_call else []


def _matmul(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [out, *kernels.workspace()]


def _addmm(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Blas.cpp: a 1-dimensional bias goes to cublasLt, whose workspace is 1 MiB."""
    if args[0].dim() == 1 and args[0].is_contiguous() and min(*args[1].shape, *args[2].shape) > 1:
        return [out, constant(MIB)]
    return [out, *kernels.workspace()]


def _native_dropout(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Dropout.cu allocates the mask first."""
    return [out[1], out[0]]


_RULES: dict[Any, Callable[[Kernels, Sequence[Any], dict[str, Any], Any], list[Step]]] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.native_dropout.default: _native_dropout,
}
