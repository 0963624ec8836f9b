"""Do float32 matrix products run in TF32? torch has two settings for it, and refuses to read the old one once the new was used."""

from __future__ import annotations

import torch


def tf32_is_on() -> bool:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9; it tells what either setting said
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def set_tf32(on: bool) -> None:
    """By the setting that this transformers uses."""
    try:
        from transformers.utils.import_utils import enable_tf32
    except ImportError:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    else:
        enable_tf32(on)
