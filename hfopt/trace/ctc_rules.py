"""The CTC loss on CUDA: its second output is as wide as the longest target, which only the targets' values tell.

Mirrors ATen/native/cuda/LossCTC.cu. log_alpha is [batch, frames, 2 × longest target + 1]; backward takes a second one for log_beta.
cuDNN's kernel is left out: it wants int32 targets, transformers has int64 ones and switches cuDNN off around the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hfopt.trace.formulas import constant
from hfopt.trace.kernels import Kernels, Step
from hfopt.trace.values import twin

aten = torch.ops.aten
_FORWARD = (aten._ctc_loss.default, aten._ctc_loss.Tensor)
_BACKWARD = (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
CTC = frozenset(_FORWARD + _BACKWARD)


def ctc_output(func: Any, args: Sequence[Any]) -> Any:
    """Fake outputs of the loss and of its backward, or None for targets whose lengths are not known."""
    if func in _BACKWARD:
        return args[1].new_empty(args[1].shape)
    log_probs, targets, _, target_lengths = args[:4]
    longest = _longest(targets, target_lengths)
    if longest is None:
        return None
    frames, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, frames, 2 * longest + 1)


def _longest(targets: torch.Tensor, lengths: Any) -> int | None:
    """The longest target; where only the padded width is known, that."""
    if not isinstance(lengths, torch.Tensor):
        return max(map(int, lengths))
    real = twin(lengths)
    if real is not None:
        with _disable_current_modes():
            return int(real.max())
    return int(targets.shape[1]) if targets.dim() == 2 else None


def _lengths(batch: int) -> list[Step]:
    """Target lengths, input lengths and offsets, brought to the device as int64."""
    return [constant(8 * batch)] * 3


def ctc_forward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    return [*_lengths(args[0].shape[1]), out[1], out[0]]


def ctc_backward(kernels: Kernels, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> list[Step]:
    log_alpha = args[6]
    return [*_lengths(args[1].shape[1]), constant(log_alpha.numel() * log_alpha.element_size()), out]
