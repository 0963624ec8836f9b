"""The states bitsandbytes' optimizers keep, by its rules, without bitsandbytes: bytes, not arithmetic.

Rules (bitsandbytes/optim/optimizer.py): 8-bit states hold one byte per element and a float32 scale per block of 256; tensors below 4096
elements and, in the Trainer, embeddings keep 32 bits. Paged states of at least 100,000 elements live in managed memory, which the driver
keeps on the host until a kernel needs it: they are not counted here. The update kernels work in place.
"""

from __future__ import annotations

import re
from typing import Any

import torch

_NAME = re.compile(r"^(paged_)?(adamw|lion|rmsprop|ademamix)(_bnb)?(_8bit|_32bit)?$")
_STATES = {"adamw": 2, "lion": 1, "rmsprop": 1, "ademamix": 3}
_BLOCK = 256
_SMALLEST_8BIT = 4096
_SMALLEST_PAGED = 100_000


def is_bitsandbytes(optim: str) -> bool:
    match = _NAME.match(optim)
    return match is not None and (match[1] is not None or match[2] in ("lion", "ademamix") or match[3] is not None or match[4] is not None)


class BitsAndBytes(torch.optim.Optimizer):  # type: ignore[misc]
    """Allocates at its first step what bitsandbytes would, and nothing afterwards."""

    def __init__(self, model: Any, groups: list[dict[str, Any]], optim: str) -> None:
        match = _NAME.match(optim)
        assert match is not None
        self._paged = match[1] is not None
        self._states = _STATES[match[2]]
        self._eight_bit = match[4] == "_8bit"
        self._embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        super().__init__(groups, {"lr": 5e-5})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and not self.state[parameter]:
                        self._start(parameter)

    def _start(self, parameter: torch.Tensor) -> None:
        eight = self._eight_bit and parameter.numel() >= _SMALLEST_8BIT and parameter not in self._embeddings
        paged = self._paged and parameter.numel() >= _SMALLEST_PAGED
        state = self.state[parameter]
        state["step"] = 0
        for number in range(self._states):
            if not paged:
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8 if eight else torch.float32)
            if eight:
                state[f"absmax{number}"] = torch.zeros(-(-parameter.numel() // _BLOCK), dtype=torch.float32)
