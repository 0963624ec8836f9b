"""LM heads that never hold whole logits: one tile of tokens in place of a loop over them, and TRL's fused head traced so.

TRL (kernels/chunked_logprob.py, from 1.7 on) walks over the tokens in tiles of `TOKEN_CHUNK_SIZE` rows. How many tiles there are depends on
the batch, so two traces would differ; all tiles take and return the same memory. One is therefore run, of a row count that nothing else
has, and what it takes is recorded as a formula: the smaller of all rows and a tile's, times the bytes of a row. Its Triton kernels work in
place on a tile: they are stood in for by an operation that does too. What is borrowed stands in `_BORROWED`; a version of TRL
that lacks one of them is traced as it is.

Liger cuts the tokens into about equal slices, whose length is a power of two (`trace.liger`): the same tile with another formula.
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

from hfopt.trace.events import SLICE, TILE, Formula

if TYPE_CHECKING:
    from hfopt.trace.op_cost import Cost
    from hfopt.trace.recorder import Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """`rows` is the count the traced tile has in place of min(total, most): a number that no other dimension there has."""

    rows: int
    total: int
    most: int
    slices: int | None = None  # cut into so many instead, rounded up to a power of two

    @classmethod
    def of(cls, total: int, *, most: int, taken: Sequence[int], slices: int | None = None) -> Tile:
        rows = total // 2 + 1
        while rows in taken and rows > 1:
            rows -= 1
        return cls(rows=rows, total=total, most=most, slices=slices)

    def size(self, tensor: torch.Tensor, size: int) -> Formula | None:
        """How many bytes a tensor of the tile takes at any batch size; None for a tensor that is not of the tile."""
        if self.rows not in tensor.shape:
            return None
        if self.slices is not None:
            return Formula(SLICE, (self.total, self.slices, size // self.rows))
        return Formula(TILE, (self.total, self.most, size // self.rows))

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
                put(module, "_addmm_fp32", add_product)
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


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """TRL's `_addmm_fp32` as it is on CUDA: no float32 copies of half-precision factors."""
    if a.dtype in (torch.float16, torch.bfloat16):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a, b)
