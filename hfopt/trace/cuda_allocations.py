"""What CUDA kernels take besides their outputs: the steps of each operation's allocations and their sizes.

The CTC loss on CUDA: its second output is as wide as the longest target, which only the targets' values tell. Mirrors
ATen/native/cuda/LossCTC.cu. log_alpha is [batch, frames, 2 × longest target + 1]; backward takes a second one for log_beta. cuDNN's kernel
is left out: it wants int32 targets, transformers has int64 ones and switches cuDNN off around the loss.

Each rule mirrors one C++ file of PyTorch. An operation's allocations are a list of steps: an output tensor, an output whose size is
not the CPU's (`SizedTemporary`), a `Formula` for a temporary that is returned when the operation ends, or the number of a temporary
to return now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hfopt.trace.events import COLUMN_REDUCTION, EFFICIENT_BACKWARD, Formula, Kernels, SizedTemporary, Step, constant, round_up
from hfopt.trace.fake_tensors import twin

if TYPE_CHECKING:
    import torch


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
    """transformers/cuda/attention_backward.cu: gradients of grouped heads expanded, delta, then the workspace of
    mem_eff_attention/kernel_backward.h."""
    gradient, query, key = args[0], args[1], args[2]
    batch, heads, length, width = query.shape
    sums = constant(batch * heads * length * 4)
    steps: list[Step] = [tensor for tensor in out if isinstance(tensor, torch.Tensor)]
    grouped = key.shape[1] != heads
    if grouped:
        steps += [constant(batch * heads * key.shape[2] * side.shape[-1] * query.element_size()) for side in (key, args[3])]
    if query.dtype in _HALF:
        steps.append(sums)
    else:  # delta = (grad * out).sum(-1) as three operations
        first = 2 * grouped
        steps += [constant(gradient.numel() * 4), sums, sums, first, first + 1]
    half = int(query.dtype in _HALF)
    return [*steps, Formula(EFFICIENT_BACKWARD, (batch * heads, length, key.shape[2], width, half, kernels.roomy))]


aten = torch.ops.aten
_FORWARD = (aten._ctc_loss.default, aten._ctc_loss.Tensor)
_BACKWARD = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
_LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default
LAID_OUT = frozenset((*_FORWARD, *_BACKWARD, _LOG_SOFTMAX_BACKWARD))
"""Operations whose outputs are not on CUDA what they are for fake tensors."""


def cuda_output(func: Any, args: Sequence[Any]) -> Any:
    """Fake outputs as CUDA lays them out, or None where they are the usual ones: of the CTC loss (its targets' lengths must be known) and
    its backward, and of log_softmax's backward, whose output is contiguous though its gradient is not (CTC's is turned)."""
    if func is _LOG_SOFTMAX_BACKWARD:
        return None if args[0].is_contiguous() else args[0].new_empty(args[0].shape, dtype=args[3])
    if func in _BACKWARD:
        return args[1].new_empty(args[1].shape)
    log_probs, targets, _, target_lengths = args[:4]
    longest = _longest(targets, target_lengths)
    if longest is None:
        return None
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * longest + 1)


def _longest(targets: torch.Tensor, lengths: Any) -> int | None:
    """The longest target; where only the padded width is known, that."""
    if not isinstance(lengths, torch.Tensor):
        return max(map(int, lengths))
    real = twin(lengths)
    if real is not None:
        with _disable_current_modes():
            return int(real.max())
    return int(targets.shape[1]) if targets.dim() == 2 else None


def _lengths(batch: int) -> list[Step]:
    """Target lengths, input lengths and offsets, brought to the device as int64."""
    return [constant(8 * batch)] * 3


def ctc_forward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [*_lengths(args[0].shape[1]), out[1], out[0]]


def ctc_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    log_alpha = args[6]
    return [*_lengths(args[1].shape[1]), constant(log_alpha.numel() * log_alpha.element_size()), out]


Rule: TypeAlias = Callable[[Kernels, Sequence[Any], dict[str, Any], Any], list[Step]]


def _matmul(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [out, *kernels.workspace()]


def _into(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """A product written into a tensor that is there."""
    return kernels.workspace()


def _addmm(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt: a 1-dimensional bias goes to cublasLt."""
    if args[0].dim() == 1 and args[0].is_contiguous() and min(args[2].shape) > 1:
        return [out, *kernels.lt_workspace()]
    return [out, *kernels.workspace()]


def _native_dropout(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Dropout.cu allocates the mask first."""
    return [out[1], out[0]]


def _softmax_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/SoftMax.cu, softmax_backward_cuda_out: the product of gradient and output as a tensor of its own. That of eager
    attention among samples in one row grows with the square of the batch."""
    return [out, Formula("product", (*args[0].shape, args[0].element_size()))]


def _log_softmax_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/SoftMax.cu, host_softmax_backward: `grad_.contiguous()` beside the output."""
    return [out, *_packed(args[:1])]


def _packed(tensors: Sequence[Any]) -> list[Step]:
    """Copies of what a kernel wants contiguous and is not."""
    return [constant(tensor.numel() * tensor.element_size()) for tensor in tensors if not tensor.is_contiguous()]


def _normalization(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/layer_norm_kernel.cu keeps mean and rstd in float32 whatever the input is."""
    statistics = (SizedTemporary(statistic, statistic.numel() * max(4, statistic.element_size())) for statistic in out[1:])
    return [*_packed(args[:1]), out[0], *statistics]


def _normalization_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [*_packed(args[:2]), *(gradient for gradient in out if gradient is not None)]


def _reduction(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/Reduce.cuh: few outputs over many rows are reduced by several blocks through global memory."""
    source = args[0]
    if not source.is_floating_point() and source.dtype != out.dtype:  # ReduceOps.cpp: counted in the type of the result, a copy in it first
        return [constant(source.numel() * out.element_size()), out]
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
    return [out, Formula(COLUMN_REDUCTION, (outputs, source.numel() // outputs, vector, kernels.multiprocessors, kernels.threads))]


def _convolution(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """Convolution.cpp: a contiguous input; ATen/native/cudnn/ConvShared.cpp: the output, then the weight in the layout of the input."""
    return [*_contiguous(args[0]), out, *_in_layout_of(args[0], args[1], args[8])]


def _convolution_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ConvShared.cpp: the incoming gradient and the weight in the input's layout; Convolution.cpp: the bias's gradient is a plain sum."""
    incoming, source, weight, groups = args[0], args[1], args[2], args[9]
    own = _contiguous(source) if out[1] is not None else []
    copied = _contiguous(incoming) if source.dim() == 5 else _in_layout_of(source, incoming, groups)
    steps: list[Step] = [*own, *copied]
    if out[0] is not None:
        weight_copy = _in_layout_of(source, weight, groups)
        steps += [out[0], *weight_copy, *([len(own) + len(copied)] if weight_copy else [])]
    if out[1] is not None:
        steps.append(out[1])
    steps += [len(own)] if copied else []
    if out[2] is not None:
        steps += _reduction(kernels, (incoming, [0, *range(2, incoming.dim())]), {}, out[2])
    return steps


def _contiguous(source: torch.Tensor) -> list[Step]:
    """A copy of a video that is no plain block of memory: its frames were put before its channels by a view."""
    return _packed([source]) if source.dim() == 5 and not source.is_contiguous(memory_format=torch.channels_last_3d) else []


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


def _masked_scatter(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """ATen/native/cuda/IndexKernel.cu: where each element comes from is a running count over the mask, in int64; the mask in full."""
    return [
        out,
        constant(8 * out.numel()),
        *([] if args[1].numel() == out.numel() and args[1].is_contiguous() else [constant(out.numel())]),
    ]


def _masked_scatter_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    """TensorAdvancedIndexing.cpp: masked_select, which is an index by nonzero(): a position in each dimension for each element chosen."""
    return [constant(8 * args[0].dim() * out.numel()), out]


RULES: dict[Any, Rule] = {
    aten.masked_scatter.default: _masked_scatter,
    aten.masked_scatter_backward.default: _masked_scatter_backward,
    aten.mm.default: _matmul,
    **dict.fromkeys((aten.mm.out, aten.addmm.out, aten.addmm_.default, getattr(aten.addmm, "dtype_out", None)), _into),
    aten.bmm.default: _matmul,
    aten.baddbmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.addmm.default: _addmm,
    aten.native_dropout.default: _native_dropout,
    aten._softmax_backward_data.default: _softmax_backward,
    aten.native_layer_norm.default: _normalization,
    aten.native_layer_norm_backward.default: _normalization_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.sum.default: _reduction,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    _LOG_SOFTMAX_BACKWARD: _log_softmax_backward,
    aten._ctc_loss.default: ctc_forward,
    aten._ctc_loss.Tensor: ctc_forward,
    aten._ctc_loss_backward.default: ctc_backward,
    aten._ctc_loss_backward.Tensor: ctc_backward,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
}
