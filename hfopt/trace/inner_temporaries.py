"""What CUDA kernels take besides their outputs, and in which order: the part of memory the dispatcher never shows.

Each rule mirrors one C++ file of PyTorch. An operation's allocations are a list of steps: an output tensor, an output whose size is not
the CPU's (`Sized`), a `Formula` for a temporary that is returned when the operation ends, or the number of a temporary to return now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from hfopt.trace.attention_temporaries import efficient_backward, efficient_forward, flash_backward
from hfopt.trace.ctc_rules import ctc_backward, ctc_forward
from hfopt.trace.formulas import Formula, constant
from hfopt.trace.kernels import Kernels, Sized, Step

aten = torch.ops.aten
Rule: TypeAlias = Callable[[Kernels, Sequence[Any], dict[str, Any], Any], list[Step]]


def _matmul(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [out, *kernels.workspace()]


def _addmm(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt: a 1-dimensional bias goes to cublasLt."""
    if args[0].dim() == 1 and args[0].is_contiguous() and min(args[2].shape) > 1:
        return [out, *kernels.lt_workspace()]
    return [out, *kernels.workspace()]


def _native_dropout(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Dropout.cu allocates the mask first."""
    return [out[1], out[0]]


def _packed(tensors: Sequence[Any]) -> list[Step]:
    """Copies of what a kernel wants contiguous and is not."""
    return [constant(tensor.numel() * tensor.element_size()) for tensor in tensors if not tensor.is_contiguous()]


def _normalization(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/layer_norm_kernel.cu keeps mean and rstd in float32 whatever the input is."""
    statistics = (Sized(statistic, statistic.numel() * max(4, statistic.element_size())) for statistic in out[1:])
    return [*_packed(args[:1]), out[0], *statistics]


def _normalization_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [*_packed(args[:2]), *(gradient for gradient in out if gradient is not None)]


def _reduction(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Reduce.cuh: few outputs over many rows are reduced by several blocks through global memory."""
    source = args[0]
    dims = args[1] if len(args) > 1 and args[1] is not None else None
    if dims is None or out.numel() <= 1:
        return [out]
    reduced = {dim % source.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
    by_stride = sorted((dim for dim in range(source.dim()) if source.shape[dim] > 1), key=source.stride)
    if not by_stride or source.stride(by_stride[0]) != 1 or by_stride[0] in reduced or not reduced:
        return [out]
    width = 1
    for dim in by_stride:  # the kept dimensions that merge into the fastest one
        if dim in reduced:
            break
        width *= source.shape[dim]
    vector = next(v for v in (4, 2, 1) if width % v == 0)
    outputs = out.numel()
    return [out, Formula("column_reduction", (outputs, source.numel() // outputs, vector, kernels.multiprocessors, kernels.threads))]


def _convolution(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cudnn/ConvShared.cpp: the output, then the weight in the layout of the input."""
    return [out, *_in_layout_of(args[0], args[1], args[8])]


def _convolution_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ConvShared.cpp: the incoming gradient and the weight in the input's layout; Convolution.cpp: the bias's gradient is a plain sum."""
    incoming, source, weight, groups = args[0], args[1], args[2], args[9]
    copied = _in_layout_of(source, incoming, groups)
    steps: list[Step] = list(copied)
    if out[0] is not None:
        weight_copy = _in_layout_of(source, weight, groups)
        steps += [out[0], *weight_copy, *([len(copied)] if weight_copy else [])]
    if out[1] is not None:
        steps.append(out[1])
    steps += [0] if copied else []
    if out[2] is not None:
        steps += _reduction(kernels, (incoming, [0, *range(2, incoming.dim())]), {}, out[2])
    return steps


def _in_layout_of(source: torch.Tensor, other: torch.Tensor, groups: int) -> list[Step]:
    """A copy of `other` where it has not the layout of `source`; depthwise kernels take either."""
    if source.dim() != 4 or groups != 1:
        return []
    last = not source.is_contiguous() and source.is_contiguous(memory_format=torch.channels_last)
    if other.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format):
        return []
    return [constant(other.numel() * other.element_size())]


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


RULES: dict[Any, Rule] = {
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.addmm.default: _addmm,
    aten.native_dropout.default: _native_dropout,
    aten.native_layer_norm.default: _normalization,
    aten.native_layer_norm_backward.default: _normalization_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._ctc_loss.default: ctc_forward,
    aten._ctc_loss.Tensor: ctc_forward,
    aten._ctc_loss_backward.default: ctc_backward,
    aten._ctc_loss_backward.Tensor: ctc_backward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}


def order_on_cuda(kernels: Kernels, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step] | None:
    """The steps of one operation, or None: its outputs in order and nothing else."""
    rule = RULES.get(func)
    return None if rule is None else rule(kernels, args, kwargs, out)
