"""What one dispatched operation costs a GPU, and the kernels of a step grouped by equal cost.

What one dispatched aten op costs a GPU: floating point operations, bytes moved through memory, its kind and, for a matmul, its shape.
`cost` is pure: it looks at shapes, strides and dtypes only, so fake tensors do. It answers for one *kernel* and says how many the op takes
(`launches`: the multi-tensor kernels of the optimizer take several). None means no kernel runs: views, empty allocations, aliases.

FLOPs are multiply and add counted separately (2·m·n·k). Bytes are what a kernel must read and write once: an expanded dimension (stride 0)
is counted once, a gather reads what it returns and not the whole table, an op in place reads and writes. Known limits: caches are not
modelled, so an op that finds its input in L2 is charged for it; a convolution is charged as the matmul it is equal to.

The kernels of a step, grouped: equal kernels of the two traces, matched in order, with every quantity affine in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from hfopt.schema import OpCost
from hfopt.trace.cuda_choices import launches_of

if TYPE_CHECKING:
    from hfopt.trace.events import Trace


Kind = Literal["matmul", "attention", "conv", "elementwise", "reduction", "embedding", "optimizer", "copy", "other"]
Shape = tuple[int, int, int, int]  # m, n, k, batch


@dataclass(frozen=True, slots=True)
class Cost:
    """One kernel. `dtype` is that of the arithmetic: the first floating input's, or the output's where there is none."""

    kind: Kind
    flops: float
    moved_bytes: float
    dtype: str
    shape: Shape | None = None
    launches: int = 1


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MATMULS = _names("mm addmm bmm baddbmm mv addmv dot _scaled_mm _grouped_mm _int_mm")
ATTENTION = "_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_"
RECURRENT = _names("_cudnn_rnn _cudnn_rnn_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward miopen_rnn")
GATHERS = _names("embedding index_select index gather _unsafe_index _embedding_bag nll_loss_forward nll_loss2d_forward")
SCATTERS = _names("""embedding_dense_backward index_put index_put_ _index_put_impl_ _unsafe_index_put index_add index_add_ scatter scatter_
    scatter_add scatter_add_ index_copy""")
COPIES = _names("""copy_ _to_copy clone cat stack constant_pad_nd _copy_from split_with_sizes_copy roll flip repeat slice_backward
    select_backward im2col col2im""")
FILLS = _names("""zero_ fill_ zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange eye scalar_tensor linspace
    rand randn rand_like randint nll_loss_backward nll_loss2d_backward""")
REDUCTIONS = _names("""sum mean var std norm softmax nll_loss amax amin argmax argmin max min all any cumsum cumprod prod topk sort median
    logsumexp pool upsample count_nonzero bincount nonzero unique""")
NO_KERNEL = _names("""empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh lift detach detach_ alias resize_
    set_ record_stream _reshape_alias requires_grad_""")
FOREACH_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # ATen/native/cuda/MultiTensorApply.cuh: depth_to_max_tensors
FOREACH_BLOCKS_PER_LAUNCH = 320  # the same file: depth_to_max_blocks
FOREACH_CHUNK = 65536  # the same file: kChunkSize, elements of one block


def cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost | None:
    """The cost of the op that was just dispatched; None when it launches nothing."""
    facts = _facts(func)
    if facts.kind is None:
        return None
    outputs = [] if facts.writes else list(_tensors(out))
    if facts.family == "matmul":
        return _matmul(facts.name, args, outputs)
    if facts.family == "attention":
        return _attention(facts.name, func, args, kwargs, out)
    if facts.family == "conv":
        return _convolution(facts.name, args, outputs)
    if facts.family == "recurrent":
        return _recurrent(facts.name, args, outputs)
    if facts.family == "foreach":
        return _foreach(facts, args, kwargs, outputs)
    return _memory_bound(facts, args, kwargs, outputs)


# ---------------------------------------------------------------------------------------------- what an op is


@dataclass(frozen=True, slots=True)
class _Facts:
    name: str
    kind: Kind | None  # None: no kernel
    family: str
    written: tuple[int | str, ...]  # positions (or names) of arguments that are written

    @property
    def writes(self) -> bool:
        return bool(self.written)


@cache
def _facts(func: Any) -> _Facts:
    name = func.__name__.split(".")[0] if hasattr(func, "__name__") else str(func)
    schema = func._schema
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    kind, family = _classify(name, is_view=func.is_view and not written)
    return _Facts(name, kind, family, written)


def _classify(name: str, *, is_view: bool) -> tuple[Kind | None, str]:
    if is_view or name in NO_KERNEL:
        return None, "none"
    if name in MATMULS:
        return "matmul", "matmul"
    if name.startswith(ATTENTION):
        return "attention", "attention"
    if "convolution" in name:
        return "conv", "conv"
    if name in RECURRENT:
        return "matmul", "recurrent"
    if name.startswith("_foreach_"):
        return ("reduction" if "norm" in name else "optimizer"), "foreach"
    if name.startswith("_fused_") and ("adam" in name or "sgd" in name):
        return "optimizer", "foreach"
    if name in GATHERS:
        return "embedding", "gather"
    if name in SCATTERS:
        return "embedding", "scatter"
    if name in FILLS:
        return "elementwise", "fill"
    if name in COPIES:
        return "copy", "plain"
    if name == "_local_scalar_dense":
        return "other", "sync"
    if any(word in name for word in REDUCTIONS):
        return "reduction", "plain"
    return "elementwise", "plain"


# ---------------------------------------------------------------------------------------------- bytes


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes a kernel must go through: a dimension of stride 0 is one element, however often it repeats."""
    elements = int(tensor.element_size())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            elements *= int(size)
    return elements


def _moved(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_touched_bytes(tensor) for tensor in tensors)


def _dtype(tensors: Sequence[torch.Tensor]) -> str:
    chosen = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), tensors[0].dtype if tensors else torch.float32)
    return str(chosen).removeprefix("torch.")


def _written(facts: _Facts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for where in facts.written:
        if isinstance(where, str):
            found.extend(_tensors(kwargs.get(where)))
        elif where < len(args):
            found.extend(_tensors(args[where]))
    return found


def _memory_bound(facts: _Facts, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> Cost | None:
    inputs = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
    results = _written(facts, args, kwargs) if facts.writes else list(outputs)
    if facts.family == "sync":
        return Cost("other", 0.0, 0.0, _dtype(inputs))
    if not results:
        return None  # profiler marks and questions about a tensor
    elements = sum(tensor.numel() for tensor in results)
    read = _moved(inputs)
    if facts.family == "gather":
        indices = [tensor for tensor in inputs if not tensor.is_floating_point()]
        read = _moved(indices) + _moved(results)
    elif facts.family == "scatter" and facts.writes:
        read = 2 * _moved(inputs[-1:])  # only the places it writes
        results = []
    elif facts.family == "fill":
        read = 0
    elif facts.name == "copy_":
        read = _moved(inputs[1:])
    assert facts.kind is not None
    flops = max(elements, *(tensor.numel() for tensor in inputs)) if inputs else elements
    return Cost(facts.kind, float(flops), float(read + _moved(results)), _dtype([*inputs, *results]))


def _foreach(facts: _Facts, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]) -> Cost | None:
    """The multi-tensor kernels: few launches over many tensors, limited by tensors and by blocks per launch."""
    lists = [list(_tensors(value)) for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    lists = [tensors for tensors in lists if tensors]
    if not lists:
        return None
    elements = [tensor.numel() for tensor in lists[0]]
    depth = min(5, len(lists) + bool(outputs))
    blocks = sum(-(-count // FOREACH_CHUNK) for count in elements)
    launches = max(1, math.ceil(len(elements) / FOREACH_TENSORS_PER_LAUNCH[depth]), math.ceil(blocks / FOREACH_BLOCKS_PER_LAUNCH))
    results = _written(facts, args, kwargs) if facts.writes else list(outputs)
    moved = sum(_moved(tensors) for tensors in lists) + _moved(results)
    assert facts.kind is not None
    return Cost(facts.kind, sum(elements) / launches, moved / launches, _dtype(lists[0]), launches=launches)


# ---------------------------------------------------------------------------------------------- arithmetic


def _matmul(name: str, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost | None:
    operands = [tensor for tensor in _tensors(tuple(args)) if tensor.dim() >= 1]
    if name in ("addmm", "baddbmm", "addmv"):
        operands = operands[1:] if len(operands) > 2 else operands
    if len(operands) < 2:
        return None
    left, right = operands[0], operands[1]
    batch = math.prod(left.shape[:-2]) if left.dim() > 2 else 1
    m = left.shape[-2] if left.dim() > 1 else 1
    k = left.shape[-1]
    n = right.shape[-1] if right.dim() > 1 else 1
    moved = _moved([left, right]) + _moved(outputs)
    return Cost("matmul", 2.0 * batch * m * n * k, float(moved), _dtype(operands), (m, n, k, batch))


def _attention(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost | None:
    """Scores and their product with the values: 4·B·H·Lq·Lk·D forward, 2.5 times that backward (five matmuls for two); causal is half."""
    backward = "backward" in name
    tensors = [tensor for tensor in _tensors(tuple(args)) if tensor.dim() == 4]
    q, k, v = tensors[1:4] if backward else tensors[:3]
    batch, heads, queries, width = q.shape
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    share = 0.5 if named.get("is_causal") and queries == k.shape[-2] else 1.0
    pairs = share * batch * heads * queries * k.shape[-2]
    flops = 2.0 * pairs * (width + v.shape[-1]) * (2.5 if backward else 1.0)
    results = [tensor for tensor in _tensors(out) if tensor.is_floating_point()]
    moved, launches = float(_moved(tensors) + _moved(results)), launches_of(q.shape)
    shape = (queries, k.shape[-2], width, batch * heads // launches)
    return Cost("attention", flops / launches, moved / launches, _dtype(tensors), shape, launches=launches)


def _convolution(name: str, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost | None:
    """As the matmul it equals: pixels × output channels × (input channels per group × kernel), once forward, once for each gradient."""
    backward = "backward" in name
    if backward:
        grad, source, weight, *rest = args
        transposed, groups = rest[4], rest[6]
        mask = rest[7]
        target, repeats = grad, float(bool(mask[0])) + float(bool(mask[1]))
    else:
        source, weight = args[0], args[1]
        target, repeats = outputs[0], 1.0
        transposed, groups = (args[6], args[8]) if len(args) > 8 else (False, 1)
    grid = source if transposed else target
    pixels = grid.numel() // max(grid.shape[1], 1)
    taps = math.prod(weight.shape[1:])
    n = weight.shape[0] // groups
    flops = 2.0 * pixels * weight.shape[0] * taps * repeats
    moved = _moved([source, weight, target] if backward else [source, weight]) + _moved(outputs)
    return Cost("conv", flops, float(moved), _dtype([source]), (pixels, n, taps, groups))


def _recurrent(name: str, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost | None:
    """A recurrent layer: its weights meet every time step, one launch per step and layer."""
    tensors = list(_tensors(tuple(args)))
    sequence = max((tensor for tensor in tensors if tensor.dim() == 3), key=lambda tensor: tensor.numel(), default=tensors[0])
    weights = sum(tensor.numel() for tensor in tensors if tensor.dim() == 2)
    steps, batch = sequence.shape[0], sequence.shape[1] if sequence.dim() > 1 else 1
    repeats = 2.0 if "backward" in name else 1.0
    moved = _moved(tensors) + _moved(outputs)
    return Cost("matmul", 2.0 * batch * weights * repeats, moved / steps, _dtype(tensors), launches=max(steps, 1))


def grouped(first: Trace, second: Trace) -> tuple[OpCost, ...]:
    """One OpCost per distinct kernel; `count` is how often it runs in one micro-batch (or optimizer step)."""
    counts: Counter[OpCost] = Counter()
    for (phase, name, one), (_, _, two) in zip(first.costs, second.costs, strict=True):
        op = _affine(phase, name, (first.batch, one), (second.batch, two))
        counts[op] += one.launches
    return tuple(replace(op, count=float(count)) for op, count in counts.items())


def proportional(trace: Trace) -> tuple[OpCost, ...]:
    """From one trace alone: the kernels of a micro-batch grow with it, those of the optimizer do not."""
    counts: Counter[OpCost] = Counter()
    for phase, name, one in trace.costs:
        factor = 1 if phase == "optimizer" else 2
        grown = replace(one, flops=factor * one.flops, moved_bytes=factor * one.moved_bytes, shape=None)
        counts[_affine(phase, name, (trace.batch, one), (2 * trace.batch, grown))] += one.launches
    return tuple(replace(op, count=float(count)) for op, count in counts.items())


def _affine(phase: str, name: str, first: tuple[int, Cost], second: tuple[int, Cost]) -> OpCost:
    (batch, one), (other, two) = first, second
    span = other - batch

    def line(a: float, b: float) -> tuple[float, float]:
        slope = (b - a) / span
        return a - slope * batch, slope

    flops, moved = line(one.flops, two.flops), line(one.moved_bytes, two.moved_bytes)
    shape = tuple(line(a, b) for a, b in zip(one.shape, two.shape, strict=True)) if one.shape and two.shape else ()
    return OpCost(
        name=name,
        kind=one.kind,
        dtype=one.dtype,
        phase=phase,  # type: ignore[arg-type]
        count=0.0,
        flops_constant=flops[0],
        flops_slope=flops[1],
        bytes_constant=moved[0],
        bytes_slope=moved[1],
        shape=tuple((round(constant), round(slope)) for constant, slope in shape),
    )
