"""Kernels written in Triton (TRL's, liger's) on the virtual GPU: never compiled, and launching one does nothing, as with all others.

What they read and write is allocated outside of them, by torch, so memory is counted as on a card. Triton's own driver would look for
NVIDIA's library in the system; one that only names the card answers instead.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

_WARP = 32


class _Card:
    """As much of a Triton driver as code outside a kernel asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = os.environ["HFOPT_VIRTUAL_CAPABILITY"].split(".")
        return GPUTarget("cuda", int(major) * 10 + int(minor), _WARP)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_current_device(self) -> int:
        return int(torch.cuda.current_device())

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        """Triton 3.2 asks for it where a kernel is defined."""
        return launch_nothing


def launch_nothing(*_: Any, **__: Any) -> None:
    """In place of every launch."""


def install(triton: ModuleType) -> None:
    """Every kernel comes from the JIT; the autotuner would time its launches."""
    runtime = triton.runtime
    runtime.driver.set_active(_Card())
    runtime.jit.JITFunction.run = runtime.autotuner.Autotuner.run = launch_nothing
