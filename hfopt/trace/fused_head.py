"""LM heads that never hold whole logits: TRL's fused head and Liger's loss in a trace, one tile of tokens in place of a loop over them.

TRL (kernels/chunked_logprob.py, from 1.7 on) walks over the tokens in tiles of `TOKEN_CHUNK_SIZE` rows. How many tiles there are depends on
the batch, so two traces would differ; all tiles take and return the same memory. One is therefore run, of a row count that nothing else
has, and what it takes is recorded as a formula: the smaller of all rows and a tile's, times the bytes of a row. Its Triton kernels work in
place on a tile: they are stood in for by an operation that does too. What is borrowed stands in `_BORROWED`; a version of TRL
that lacks one of them is traced as it is.

As liger-kernel does it (ops/fused_linear_cross_entropy.py): the tokens are cut into slices whose logits take about as much as the hidden
states; each slice's logits become their own gradient in place, and the gradients of hidden states and weight are made in the forward.
Liger rounds a slice up to a power of two, so it is at most twice as long: that upper bound is traced. Its other kernels (norms, rotary
embedding, gated units) are left as they are, so what they save comes on top of the estimate.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hfopt.trace.kernel_sizes import TILE, Formula

if TYPE_CHECKING:
    from hfopt.trace.op_cost import Cost
    from hfopt.trace.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """`rows` is the count the traced tile has in place of min(total, most): a number that no other dimension there has."""

    rows: int
    total: int
    most: int

    @classmethod
    def of(cls, total: int, *, most: int, taken: Sequence[int]) -> Tile:
        rows = total // 2 + 1
        while rows in taken and rows > 1:
            rows -= 1
        return cls(rows=rows, total=total, most=most)

    def size(self, tensor: torch.Tensor, size: int) -> Formula | None:
        """How many bytes a tensor of the tile takes at any batch size; None for a tensor that is not of the tile."""
        return Formula(TILE, (self.total, self.most, size // self.rows)) if self.rows in tensor.shape else None

    def whole(self, cost: Cost, tensors: Sequence[Any]) -> Cost:
        """The cost of all tiles, from that of the one that was run."""
        if not any(isinstance(tensor, torch.Tensor) and self.rows in tensor.shape for tensor in tensors):
            return cost
        share = self.total / self.rows
        m, n, k, batch = (self.total if size == self.rows else size for size in cost.shape or (0, 0, 0, 0))
        shape = None if cost.shape is None else (m, n, k, batch)
        return replace(cost, flops=cost.flops * share, moved_bytes=cost.moved_bytes * share, shape=shape)


_KERNELS = ("trl.kernels.chunked_logprob", "trl.kernels.chunked_divergence")
_CALLERS = ("trl.trainer.utils", "trl.trainer.distillation_trainer")
_BORROWED = ("TOKEN_CHUNK_SIZE", "_use_triton", "ChunkedLogProbFunction")


@contextlib.contextmanager
def tiled_heads(recorder: Recorder) -> Iterator[None]:
    """While it holds, TRL's fused head does what it does on a card; nothing where TRL is not in use."""
    kernels = [module for name in _KERNELS if (module := sys.modules.get(name)) is not None]
    first = kernels[0] if kernels else None
    if first is None or any(not hasattr(first, name) for name in _BORROWED):
        yield
        return
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            """For the length of the trace; a name that was not there before goes again."""
            before = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            stack.callback(functools.partial(_put_back, owner, name, before))

        for module in (*kernels, *(sys.modules[name] for name in _CALLERS if name in sys.modules)):
            if hasattr(module, "_use_triton"):
                put(module, "_use_triton", lambda _: True)
        for module in kernels:
            for name, value in list(vars(module).items()):
                if name.endswith("_kernel"):
                    put(module, name, _Launch())
                elif inspect.isclass(value) and issubclass(value, torch.autograd.Function):
                    for method in ("forward", "backward"):
                        put(value, method, staticmethod(_at_its_tile(getattr(value, method), recorder)))
            if hasattr(module, "_addmm_fp32") and getattr(module, "_MM_OUT_DTYPE", False):
                put(module, "_addmm_fp32", _add_product)
            if not hasattr(module, "triton"):
                put(module, "triton", _Triton)
            if isinstance(getattr(module, "TOKEN_CHUNK_SIZE", None), int):
                put(module, "TOKEN_CHUNK_SIZE", _Rows(module.TOKEN_CHUNK_SIZE))
                put(module, "min", functools.partial(_least, recorder))
                put(module, "range", _range)
        yield


_ABSENT = object()


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


class _Rows(int):
    """The most rows of a tile, recognisable where TRL computes with it."""

    def __radd__(self, other: int) -> _Rows:
        return self


def _least(recorder: Recorder, *values: int) -> int:
    """`min`, where one of the two is the most rows of a tile: the rows of the tile that is run."""
    if recorder.tile is not None and any(isinstance(value, _Rows) for value in values):
        return recorder.tile.rows
    return builtins.min(values)


def _range(*bounds: int) -> range:
    """`range`, of which a walk over tiles takes one step."""
    return builtins.range(1) if isinstance(bounds[-1], _Rows) else builtins.range(*bounds)


def _at_its_tile(method: Any, recorder: Recorder) -> Any:
    """An autograd function's forward or backward while the recorder knows the tile; the first of its inputs are rows and weight."""

    @functools.wraps(method)
    def run(ctx: Any, *args: Any) -> Any:
        if not hasattr(ctx, "hfopt_tile"):
            module = sys.modules[method.__module__]
            ctx.hfopt_tile = Tile.of(args[0].shape[0], most=int(module.TOKEN_CHUNK_SIZE), taken=(*args[0].shape, *args[1].shape))
        before, recorder.tile = recorder.tile, ctx.hfopt_tile
        try:
            return method(ctx, *args)
        finally:
            recorder.tile = before

    return run


class _Launch:
    """In place of a Triton kernel: one pass over the tile, its first argument, in place."""

    def __getitem__(self, grid: Any) -> _Launch:
        return self

    def __call__(self, tile: torch.Tensor, *_: Any, **__: Any) -> None:
        with torch.no_grad():
            tile.neg_()


class _Triton:
    """What is asked of Triton outside of a kernel, where it is not installed."""

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """TRL's `_addmm_fp32` as it is on CUDA: no float32 copies of half-precision factors."""
    if a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a, b)


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
