"""Batches as a flash-attention package sees them: padding cut out, several samples in one row (padding-free) laid out as rows of their own.

The package computes attention within each sample. Its stand-in in a trace is PyTorch's own kernel, which does so for rows without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LAYOUT = frozenset({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""What says where samples begin in a row of several; rows of their own need none of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpadded:
    collated: Callable[[int], dict[str, Any]]

    def __call__(self, count: int) -> dict[str, Any]:
        batch = self.collated(count)
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1 and ids.shape[1] % count == 0 and _LAYOUT & batch.keys():
            shape = tuple(ids.shape)
            kept = {name: value for name, value in batch.items() if name not in _LAYOUT}
            batch = {name: value.view(count, -1) if _is_row(value, shape) else value for name, value in kept.items()}
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            batch["attention_mask"] = torch.ones_like(mask)
        return batch


def _is_row(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape
