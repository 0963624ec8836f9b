"""One tile of a loop over rows: what it takes does not grow beyond its most rows, however many rows the batch has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hfopt.trace.kernel_sizes import TILE, Formula

if TYPE_CHECKING:
    from hfopt.trace.op_cost import Cost


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
