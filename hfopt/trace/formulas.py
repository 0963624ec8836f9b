"""Sizes of kernels' temporaries that are no straight line over the batch: functions of dimensions that are.

Each mirrors the C++ that computes it. A `Formula` keeps the dimensions, so that a timeline can evaluate it at any batch size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """A size that `FORMULAS[name]` computes from dimensions; each dimension is affine in the batch."""

    name: str
    dims: tuple[int, ...]

    def bytes(self) -> int:
        return FORMULAS[self.name](*self.dims)


def constant(size: int) -> Formula:
    return Formula("bytes", (size,))


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _embedding_partials(tokens: int, rows: int, row_bytes: int) -> int:
    """EmbeddingBackwardKernel.cu: one row per partial segment at most (NROWS_PER_THREAD is 10); few tokens take another kernel."""
    return 0 if tokens <= 3072 else (tokens // 10 + min(tokens, rows)) * row_bytes


def _embedding_indices(tokens: int, token_bytes: int) -> int:
    return 0 if tokens <= 3072 else tokens * token_bytes


def _column_reduction(outputs: int, inputs: int, vector: int, multiprocessors: int, threads: int) -> int:
    """setReduceConfig and global_memory_size of ATen/native/cuda/Reduce.cuh, for a reduction over the slower dimension."""
    most_threads = 512 // vector
    across = outputs // vector
    width = min(_power_of_two_below(across, most_threads), 32)
    height = min(_power_of_two_below(inputs, most_threads), most_threads // width)
    width = min(_power_of_two_below(across, most_threads), most_threads // height)
    if inputs < min(height * 16, 256):
        return 0
    values = -(-inputs // height)
    grid = -(-across // width)
    target = multiprocessors * (threads // (width * height))
    if values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return 4 * outputs * blocks * width * vector if blocks > 1 else 0


def _power_of_two_below(value: int, most: int) -> int:
    return most if value >= most else 1 << (max(value, 1).bit_length() - 1)


def _tiles(blocks: int, rows: int, tile_rows: int, tile_bytes: int) -> int:
    """Memory-efficient attention's gradient of the query: one tile of float32 and a lock per block of rows."""
    return blocks * -(-rows // tile_rows) * tile_bytes


FORMULAS: dict[str, Callable[..., int]] = {
    "bytes": lambda size: size,
    "embedding_partials": _embedding_partials,
    "embedding_indices": _embedding_indices,
    "column_reduction": _column_reduction,
    "tiles": _tiles,
}
