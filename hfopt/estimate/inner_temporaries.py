"""What CUDA kernels take besides their outputs, and in which order: the part of memory the dispatcher never shows.

Each rule mirrors one C++ file of PyTorch. An operation's allocations are a list of steps: an output tensor, an output whose size is not
the CPU's (`Sized`), a `Formula` for a temporary that is returned when the operation ends, or the number of a temporary to return now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from hfopt.estimate.formulas import Formula, constant, round_up
from hfopt.units import KIB, MIB

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Sized:
    tensor: torch.Tensor
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Taken at the first use in each thread and never returned."""

    name: str
    bytes: int


Step: TypeAlias = torch.Tensor | Sized | Formula | Kept | int
Rule: TypeAlias = "Callable[[Kernels, Sequence[Any], dict[str, Any], Any], list[Step]]"

# multiprocessors of a common card and threads per multiprocessor (CUDA C programming guide, technical specifications per capability)
_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def resident_threads(capability: tuple[int, int], multiprocessors: int | None = None) -> int:
    """Threads that can be on the card at once."""
    return (multiprocessors or _MULTIPROCESSORS.get(capability, 80)) * _THREADS.get(capability, 2048)


class Kernels:
    """The allocation order of CUDA's kernels for one capability and one version of PyTorch."""

    def __init__(
        self, *, capability: tuple[int, int] = (8, 0), multiprocessors: int | None = None, workspace_per_call: bool = True
    ) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors or _MULTIPROCESSORS.get(capability, 80)
        self.threads = _THREADS.get(capability, 2048)
        # ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize: 32 MiB on sm_90 and later, else 4096 KiB × 2 + 16 KiB × 8
        self.cublas_bytes = 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB
        self.workspace_per_call = workspace_per_call

    def order(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step] | None:
        """The steps of one operation, or None: its outputs in order and nothing else."""
        rule = RULES.get(func)
        return None if rule is None else rule(self, args, kwargs, out)

    def workspace(self) -> list[Step]:
        return [constant(self.cublas_bytes) if self.workspace_per_call else Kept("cublas", self.cublas_bytes)]


def _matmul(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [out, *kernels.workspace()]


def _addmm(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt: a 1-dimensional bias goes to cublasLt, whose workspace is 1 MiB."""
    if args[0].dim() == 1 and args[0].is_contiguous() and min(args[2].shape) > 1:
        return [out, constant(MIB)]
    return [out, *kernels.workspace()]


def _native_dropout(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Dropout.cu allocates the mask first."""
    return [out[1], out[0]]


def _normalization(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/layer_norm_kernel.cu keeps mean and rstd in float32 whatever the input is."""
    return [out[0], *(Sized(statistic, statistic.numel() * max(4, statistic.element_size())) for statistic in out[1:])]


def _reduction(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Reduce.cuh: few outputs over many rows are reduced by several blocks through global memory."""
    source = args[0]
    dims = args[1] if len(args) > 1 and args[1] is not None else None
    if dims is None or out.numel() <= 1 or not source.is_contiguous() or source.dim() == 0:
        return [out]
    reduced = {dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = source.dim() - 1
    if not reduced or kept in reduced:
        return [out]
    width = source.shape[-1]
    for index in range(source.dim() - 2, -1, -1):  # the dimensions that merge with the last one
        if index in reduced:
            break
        width *= source.shape[index]
    vector = next(v for v in (4, 2, 1) if width % v == 0)
    outputs = out.numel()
    inputs = source.numel() // outputs
    return [out, Formula("column_reduction", (outputs, inputs, vector, kernels.multiprocessors, kernels.threads))]


def _embedding_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Embedding.cu sorts the indices, EmbeddingBackwardKernel.cu sums partial segments in float32."""
    tokens, rows, width = args[1].numel(), args[2], out.shape[-1]
    index = Formula("embedding_indices", (tokens, 8))
    sort = Formula("embedding_indices", (tokens, 16))
    segment = Formula("embedding_partials", (tokens, rows, 8))
    return [index, index, index, sort, 3, 2, out, index, index, segment, Formula("embedding_partials", (tokens, rows, width * 4))]


def _foreach_norm(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/ForeachReduceOp.cu: one partial result per chunk of 65536 elements."""
    tensors = args[0]
    chunks = sum(-(-tensor.numel() // 65536) for tensor in tensors)
    return [constant(8 * (len(tensors) + 1)), constant(4 * chunks), *out]


def _flash_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
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


def _efficient_forward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """transformers/cuda/attention.cu, _efficient_attention_forward: wide heads in half precision accumulate in a float32 buffer."""
    output, logsumexp, seed, offset = out
    steps: list[Step] = [seed, offset, output, logsumexp]
    if output.dtype in _HALF and args[2].shape[-1] > 128:
        steps.append(constant(output.numel() * 4))
    return [step for step in steps if not isinstance(step, torch.Tensor) or step.numel()]


def _efficient_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
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


RULES: dict[Any, Rule] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.addmm.default: _addmm,
    aten.native_dropout.default: _native_dropout,
    aten.native_layer_norm.default: _normalization,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
