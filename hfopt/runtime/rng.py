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
    device_type: str
    device: torch.Tensor | None


def snapshot(device: torch.device) -> RngState:
    """Of the host's generators and of the device's current one."""
    state = getattr(torch, device.type).get_rng_state() if device.type != "cpu" else None
    return RngState(python=random.getstate(), numpy=np.random.get_state(), cpu=torch.get_rng_state(), device_type=device.type, device=state)


def restore(state: RngState) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        getattr(torch, state.device_type).set_rng_state(state.device)
