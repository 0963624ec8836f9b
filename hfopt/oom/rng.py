"""The state of every random generator a training step may draw from, noted and put back.

It is noted before each step, so it must cost little: numpy builds its state number by number, and hardly any step draws from numpy. So the
generator's memory is compared first, and the state noted before is taken again where nothing was drawn.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_MT19937_BYTES = 4 * 624 + 4  # uint32 key[624]; int pos, numpy/random/src/mt19937/mt19937.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RngState:
    python: Any
    numpy: Any
    cpu: torch.Tensor
    device_type: str
    device: torch.Tensor | None


class _NumpyGenerator:
    """numpy's global generator, with what was last noted of it."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._raw: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        raw = self._memory()
        if raw is None or raw != self._raw:
            self._state = np.random.get_state(legacy=False)
            # a second normal number kept in store is used up without a change of the memory compared
            self._raw = raw if raw is not None and not self._state["has_gauss"] else None
        return self._state

    def _memory(self) -> bytes | None:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator = generator
            self._address = generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else None
        return ctypes.string_at(self._address, _MT19937_BYTES) if self._address is not None else None


_numpy = _NumpyGenerator()


def snapshot(device: torch.device) -> RngState:
    """Of the host's generators and of the device's current one."""
    state = getattr(torch, device.type).get_rng_state() if device.type != "cpu" else None
    return RngState(python=random.getstate(), numpy=_numpy.state(), cpu=torch.get_rng_state(), device_type=device.type, device=state)


def restore(state: RngState) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        getattr(torch, state.device_type).set_rng_state(state.device)
