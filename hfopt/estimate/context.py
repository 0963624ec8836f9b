"""What a process holds on the card besides PyTorch's allocator: the CUDA context and lazily loaded kernels.

A table by compute capability, because kernel images of the driver and of PyTorch differ by architecture. Sources are next to the entries;
between two entries the older one is used. The virtual GPU has no context, and a measured value (NVML after the first kernel) is better.
"""

from __future__ import annotations

from hfopt.units import MIB

# (capability, CUDA 12 and later with lazy loading, before that), in MiB
_CONTEXT_MIB: tuple[tuple[tuple[int, int], int, int], ...] = (
    ((6, 0), 300, 700),  # Pascal; NVIDIA forum reports for GTX 10xx under PyTorch: 300 lazily, 600-800 eagerly loaded
    ((7, 0), 430, 1343),  # V100: transformers docs v4.20 perf_train_gpu_one: 1343 MiB after the first kernel (CUDA 11.2, eager loading)
    ((7, 5), 310, 900),  # T4
    ((8, 0), 500, 1300),  # A100
    ((8, 6), 350, 900),  # RTX 30xx
    ((8, 9), 400, 900),  # RTX 40xx, L40S
    ((9, 0), 560, 1400),  # H100
    ((10, 0), 620, 1400),
    ((12, 0), 500, 1000),
)


def context_bytes(capability: tuple[int, int] | None, cuda_version: str | None = None) -> int:
    """The context's size; CUDA 11.7 and later load kernels lazily (CUDA_MODULE_LOADING), which PyTorch uses from CUDA 11.8 on."""
    capability = capability or (8, 0)
    eager = cuda_version is not None and _version(cuda_version) < (11, 7)
    _, lazy_mib, eager_mib = next((entry for entry in reversed(_CONTEXT_MIB) if entry[0] <= capability), _CONTEXT_MIB[0])
    return (eager_mib if eager else lazy_mib) * MIB


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
