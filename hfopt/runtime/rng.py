"""The state of every random generator a training step may draw from, noted and put back."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class RngState:
    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None


def snapshot() -> RngState:
    return RngState(python=random.getstate(), numpy=np.random.get_state(), cpu=torch.get_rng_state(), device=_device_state())


def restore(state: RngState) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        _device_module().set_rng_state(state.device)


def _device_module() -> Any:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda
    if torch.backends.mps.is_available():
        return torch.mps
    return None


def _device_state() -> torch.Tensor | None:
    module = _device_module()
    state: torch.Tensor | None = module.get_rng_state() if module is not None else None
    return state
