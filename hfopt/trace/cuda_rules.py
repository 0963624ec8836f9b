"""CUDA's choices put into a trace on CPU tensors: scoped overrides of the operations that do something else there.

The overrides sit on AutogradCPU (composite operations that pick a kernel by device) and AutocastCPU (the casting lists). They are
library registrations and not a function mode, so they also hold when checkpointing recomputes a layer inside backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hfopt.trace.attention_rules import Attention
from hfopt.trace.autocast_rules import install_cuda_lists

aten = torch.ops.aten


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA keeps a boolean mask."""
    return aten.native_dropout(x, p, True)[0] if train and 0 < p < 1 and x.numel() else x


def _softmax(op: Any) -> Any:
    """ATen/native/SoftMax.cpp: float16 to float32 is fused into the kernel on CUDA, every other conversion is a copy first."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return op(x, dim, True)
        return op(x if dtype is None else x.to(dtype), dim, False)

    return call


@contextlib.contextmanager
def cuda_rules(capability: tuple[int, int]) -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("scaled_dot_product_attention", Attention(capability), "AutogradCPU")
        library.impl("softmax.int", _softmax(aten._softmax), "AutogradCPU")
        library.impl("log_softmax.int", _softmax(aten._log_softmax), "AutogradCPU")
        install_cuda_lists(library)
        yield
