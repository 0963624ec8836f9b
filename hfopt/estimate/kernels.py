"""The steps of an operation's allocations, and the card they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from hfopt.estimate.formulas import Formula, constant
from hfopt.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class Sized:
    tensor: torch.Tensor
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Taken at the first use in each thread and never returned."""

    name: str
    bytes: int


Step: TypeAlias = torch.Tensor | Sized | Formula | Kept | int

# multiprocessors of a common card and threads per multiprocessor (CUDA C programming guide, technical specifications per capability)
_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def resident_threads(capability: tuple[int, int], multiprocessors: int | None = None) -> int:
    """Threads that can be on the card at once."""
    return (multiprocessors or _MULTIPROCESSORS.get(capability, 80)) * _THREADS.get(capability, 2048)


class Kernels:
    """The allocation order of CUDA's kernels for one capability and one version of PyTorch."""

    def __init__(
        self, *, capability: tuple[int, int] = (8, 0), multiprocessors: int | None = None, workspace_per_call: bool = True
    ) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors or _MULTIPROCESSORS.get(capability, 80)
        self.threads = _THREADS.get(capability, 2048)
        # ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize: 32 MiB on sm_90 and later, else 4096 KiB × 2 + 16 KiB × 8
        self.cublas_bytes = 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB
        self.workspace_per_call = workspace_per_call

    def workspace(self) -> list[Step]:
        return [constant(self.cublas_bytes) if self.workspace_per_call else Kept("cublas", self.cublas_bytes)]
