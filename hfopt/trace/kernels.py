"""The steps of an operation's allocations, and the card they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hfopt.compat import installed_torch
from hfopt.trace.formulas import Formula, constant
from hfopt.units import KIB, MIB

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Sized:
    tensor: torch.Tensor
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Taken at the first use in each thread and never returned."""

    name: str
    bytes: int


Step: TypeAlias = "torch.Tensor | Sized | Formula | Kept | int"

# multiprocessors of a common card and threads per multiprocessor (CUDA C programming guide, technical specifications per capability)
_MULTIPROCESSORS = {(7, 0): 80, (7, 5): 40, (8, 0): 108, (8, 6): 82, (8, 9): 128, (9, 0): 132, (10, 0): 148, (12, 0): 170}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


def resident_threads(capability: tuple[int, int], multiprocessors: int | None = None) -> int:
    """Threads that can be on the card at once."""
    return (multiprocessors or _MULTIPROCESSORS.get(capability, 80)) * _THREADS.get(capability, 2048)


class Kernels:
    """The allocation order of CUDA's kernels for one capability and one version of PyTorch (the installed one unless told).

    Who owns the workspaces of cuBLAS and cublasLt has changed (ATen/cuda/CublasHandlePool.cpp): cuBLAS kept one per thread until 2.14;
    cublasLt took 1 MiB per call until 2.8, kept it from 2.9 on (pytorch#156495), shared cuBLAS's from 2.11 on (pytorch#168175); 2.15 takes
    both anew for each call (pytorch#194311). Checked: 2.15 on the virtual GPU, 2.6 by published runs; the rest is read there.
    """

    def __init__(
        self,
        *,
        capability: tuple[int, int] = (8, 0),
        multiprocessors: int | None = None,
        torch_version: tuple[int, int] | None = None,
    ) -> None:
        self.capability = capability
        self.multiprocessors = multiprocessors or _MULTIPROCESSORS.get(capability, 80)
        self.threads = _THREADS.get(capability, 2048)
        self.torch_version = torch_version or installed_torch()
        # getChosenWorkspaceSize: 32 MiB on sm_90 and later, else 4096 KiB × 2 + 16 KiB × 8
        self.cublas_bytes = 32 * MIB if capability >= (9, 0) else 8 * MIB + 128 * KIB

    def workspace(self) -> list[Step]:
        return [constant(self.cublas_bytes) if self.torch_version >= (2, 15) else Kept("cublas", self.cublas_bytes)]

    def lt_workspace(self) -> list[Step]:
        if self.torch_version >= (2, 15) or self.torch_version < (2, 9):
            return [constant(MIB)]
        return self.workspace() if self.torch_version >= (2, 11) else [Kept("cublaslt", MIB)]
