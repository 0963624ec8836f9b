"""Windows of a vision tower, attended to together: what the model does one after the other in a loop over hundreds of equal windows.

Qwen2.5-VL and its kin cut an image into windows of some 64 patches and call the attention once for each, in nearly every layer: a
photograph makes hundreds of thousands of operations, which takes minutes to trace. Here the windows of one length become the batch of a
single call. Its outputs add up to the same bytes, and its cost counts as one launch for each window.

Known limit: one block of memory stands for many small ones, which CUDA's allocator would put into its pool of small blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

MANY = 16  # fewer pieces than this are images of a batch, which stay apart as they are in a run
_MARK = "_hfopt_windows"
_batched: set[tuple[int, ...]] = set()  # shapes (windows, heads, length, width) of the trace under way


@contextmanager
def grouped_windows() -> Iterator[None]:
    """`torch.split` along the tokens of (1, heads, tokens, width) gives one piece for each length, marked with its number of windows."""
    original = torch.split

    def split(tensor: Any, sizes: Any, dim: int = 0) -> Any:
        if not (isinstance(tensor, FakeTensor) and dim == 2 and tensor.dim() == 4 and isinstance(sizes, list) and len(sizes) > MANY):
            return original(tensor, sizes, dim)
        counts = Counter(size for size in sizes if size)
        pieces = original(tensor, [length * count for length, count in counts.items()], dim)
        for piece, count in zip(pieces, counts.values(), strict=True):
            setattr(piece, _MARK, count)
        return pieces

    torch.split = split
    _batched.clear()
    try:
        yield
    finally:
        torch.split = original


def windows_in(tensor: torch.Tensor) -> int:
    """How many windows a piece holds; 1 where it is none."""
    return getattr(tensor, _MARK, 1)


def as_batch(tensor: torch.Tensor, windows: int) -> torch.Tensor:
    """(1, heads, windows × length, width) → (windows, heads, length, width), without a copy."""
    batch = tensor.squeeze(0).unflatten(1, (windows, -1)).transpose(0, 1)
    _batched.add(tuple(batch.shape))
    return batch


def as_tokens(batch: torch.Tensor) -> torch.Tensor:
    """Back again; attention kernels put heads behind tokens in memory, so there is no copy either."""
    windows, heads, length, width = batch.shape
    return batch.transpose(1, 2).reshape(1, windows * length, heads, width).transpose(1, 2)


def launches_of(shape: torch.Size) -> int:
    """Of an attention kernel on queries of this shape: one, or one for each window."""
    return shape[0] if tuple(shape) in _batched else 1
