"""Which attention kernel CUDA takes, by dtype, mask, head size, dropout and capability; windows of a vision tower are attended to together.

Mirrors ATen/native/transformers/cuda/sdp_utils.cpp (the constraints, in its order of preference) and transformers/attention.cpp (what
is done with the mask before the kernel).

Qwen2.5-VL and its kin cut an image into windows of some 64 patches and call the attention once for each, in nearly every layer: a
photograph makes hundreds of thousands of operations, which takes minutes to trace. Here the windows of one length become the batch of a
single call. Its outputs add up to the same bytes, and its cost counts as one launch for each window.

Known limit: one block of memory stands for many small ones, which CUDA's allocator would put into its pool of small blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from hfopt.compat import installed_torch
from hfopt.trace.kernel_sizes import at_least, one_of

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class Attention:
    """The override of aten::scaled_dot_product_attention for one capability."""

    def __init__(self, capability: tuple[int, int], torch_version: tuple[int, int] | None = None) -> None:
        self.capability = capability
        self.torch_version = torch_version or installed_torch()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if (windows := windows_in(query)) > 1 and attn_mask is None:
            query, key, value = (as_batch(tensor, windows) for tensor in (query, key, value))
            return as_tokens(self(query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa))
        flash_heads, efficient_heads = self.takes_heads(query, key, value, enable_gqa=enable_gqa)
        if flash_heads and self.flash(query, key, value, attn_mask, dropout_p):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if efficient_heads and self.efficient(query, key, value, attn_mask):
            return _efficient(query, key, value, _additive(attn_mask, query), dropout_p, is_causal, scale)
        return aten._scaled_dot_product_attention_math(
            query, key, value, _additive(attn_mask, query), dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    def takes_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, enable_gqa: bool) -> tuple[bool, bool]:
        """check_batch_size_and_num_heads_dense, for flash and for memory-efficient attention. From 2.15 on the latter takes grouped heads,
        and both take one head of keys and values for all (pytorch#191085); flash took it before where it was asked to group."""
        heads, of_key, of_value = (tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in (query, key, value))
        if heads == of_key == of_value:
            return True, True
        late = self.torch_version >= (2, 15)
        grouped = enable_gqa and of_key == of_value and heads % of_key == 0
        return grouped or (late and of_key == of_value == 1), late and (grouped or of_key == of_value == 1)

    def flash(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout_p: float) -> bool:
        width = query.shape[-1]
        if mask is not None or query.dim() != 4 or query.dtype not in _HALF:
            return False
        if not (width == key.shape[-1] == value.shape[-1]) or width > 256 or any(t.stride(-1) != 1 for t in (query, key, value)):
            return False
        if not at_least(self.capability, (8, 0)):
            return False
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        wide = 192 < width <= 224 or (width > 224 and dropout_p > 0)
        trained = any(t.requires_grad for t in (query, key, value))
        return not (trained and wide and one_of(self.capability, ((8, 6), (8, 9), (12, 0), (12, 1))))

    def efficient(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
        if query.dim() != 4 or not at_least(self.capability, (8, 0) if query.dtype == torch.bfloat16 else (5, 0)):
            return False
        if query.dtype not in (*_HALF, torch.float32) or not query.shape[-2] or not key.shape[-2]:
            return False
        if any(t.stride(-1) != 1 for t in (query, key, value)):
            return False
        widths = (query.shape[-1], value.shape[-1])
        return bool(query.shape[-1] == key.shape[-1]) and (
            all(width % 8 == 0 for width in widths) or all(width % self._alignment(query.dtype) == 0 for width in widths)
        )

    def _alignment(self, dtype: torch.dtype) -> int:
        """check_head_dim_size_mem_efficient with minimum_gemm_alignment: 8 at the most."""
        if at_least(self.capability, (8, 0)):
            return 8 if dtype in _HALF else 4
        return 8 if dtype in _HALF and at_least(self.capability, (7, 0)) else 1


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """pad_last_dim<8>: heads are padded to a multiple of 8, with the scale of the true width."""
    width = query.shape[-1]
    if width % 8:
        scale = scale if scale is not None else 1 / math.sqrt(width)
        query, key, value = (torch.nn.functional.pad(t, (0, 8 - width % 8)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if width % 8 else out


def _additive(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """convert_boolean_attn_mask of attention.cpp."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype), torch.scalar_tensor(float("-inf"), dtype=query.dtype))


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """preprocess_mask of attention.cpp: a bias whose rows are not a multiple of 8 is copied into a padded one."""
    needs_gradient = any(t is not None and t.requires_grad for t in (query, key, value, mask))
    if mask is not None:
        length = mask.shape[-1]
        if length % 8 and mask.dim() > 1:
            mask = torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]


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
