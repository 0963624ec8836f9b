"""What a process holds on the card besides PyTorch's allocator: the CUDA context and the kernels loaded on first use.

The driver sets local memory aside for every thread that can be resident, so a context grows with the card: a base and so many bytes
per resident thread. Two published figures give the line, others check it (NVML or nvidia-smi after the first CUDA call, kernels loaded
lazily):

    RTX 4060, 24 multiprocessors        107 MiB at most   xMem's runs (arXiv 2510.21048): total memory less the highest sample    line
    RTX 6000 Ada, 142 multiprocessors   426 MiB           unslothai/unsloth-zoo pull request 1053, torch 2.10, CUDA 13            line
    RTX 3060, 28 multiprocessors        110 to 141 MiB    xMem's runs, from the runs that ended out of memory                     118
    V100, 80 multiprocessors            1343 MiB          transformers docs v4.20, CUDA 11.2: all kernels loaded at once          eager

The kernels a training step loads add 18 MiB: the median over xMem's 84 runs of NVML's peak less the replayed reserved memory. A value
measured on the card itself is better than this.
"""

from __future__ import annotations

from hfopt.trace.cuda_allocations import resident_threads
from hfopt.units import MIB

LOADED_KERNELS_BYTES = 18 * MIB
_BASE_BYTES = 42 * MIB
_BYTES_PER_THREAD = (426 - 107) * MIB // ((142 - 24) * 1536)
_EAGER_KERNELS_BYTES = 913 * MIB  # the V100's 1343 MiB less the line; pytorch/pytorch#107667: more than 1000 MB before CUDA 11.7


def context_bytes(capability: tuple[int, int] | None, cuda_version: str | None = None, *, multiprocessors: int | None = None) -> int:
    """Context and loaded kernels. Before CUDA 11.7 all kernels are loaded at once; without a card's size, a common one of its family."""
    context = _BASE_BYTES + _BYTES_PER_THREAD * resident_threads(capability or (8, 0), multiprocessors)
    eager = cuda_version is not None and _version(cuda_version) < (11, 7)
    return context + (_EAGER_KERNELS_BYTES if eager else LOADED_KERNELS_BYTES)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
