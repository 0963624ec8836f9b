"""Every form an out-of-memory error takes is recognised; nothing else is, and a broken context never is."""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from hfopt.facts.oom_errors import recognise
from hfopt.units import GIB, MIB

OOM_TEXTS = {
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.20 GiB is free.": "device",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call": "device",
    "CUDA driver error: out of memory": "device",
    "HIP out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.98 GiB total capacity)": "device",
    "HIP error: out of memory": "device",
    "XPU out of memory. Tried to allocate 64.00 MiB": "device",
    "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 1.2 GB, max allowed: 18.1 GB).": "device",
    "Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)": "device",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY": "device",
    "RESOURCE_EXHAUSTED: Attempting to allocate 1.5G": "device",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "library",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "library",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`": "library",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "library",
    "CUDA ran out of memory outside PyTorch's allocator. If this workload uses many dynamic shapes, cuDNN may need": "device",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "library",
    "GET was unable to find an engine to execute this computation": "library",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`": "library",
    "NCCL error in: ProcessGroupNCCL.cpp:1970\nncclUnhandledCudaError: Cuda failure 2 'out of memory'": "communication",
    "NCCL WARN Failed to CUDA calloc async 608 bytes": "communication",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.": "host",
    "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.": "host",
    "std::bad_alloc": "host",
}
OTHER_TEXTS = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 16x4)",
    "out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
    "Expected all tensors to be on the same device",
    "NCCL error: unhandled system error, remote process exited",
]


@pytest.mark.parametrize(("text", "where"), OOM_TEXTS.items())
def test_every_form_is_recognised(text: str, where: str) -> None:
    oom = recognise(RuntimeError(text))
    assert oom is not None
    assert oom.where == where
    assert oom.recoverable == (where != "communication")


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_other_faults_are_not(text: str) -> None:
    assert recognise(RuntimeError(text)) is None


def test_the_class_is_enough_when_the_text_says_nothing() -> None:
    assert recognise(torch.OutOfMemoryError("")) is not None
    assert recognise(MemoryError()) is not None
    assert recognise(OSError(errno.ENOMEM, "Cannot allocate memory")) is not None
    assert recognise(OSError(errno.ENOENT, "no such file")) is None
    assert recognise(ValueError("CUDA out of memory.")) is None


def test_a_real_failure_of_the_cpu_allocator_and_of_numpy() -> None:
    with pytest.raises(RuntimeError) as torch_error:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as numpy_error:
        np.empty(1 << 60, dtype=np.uint8)
    assert recognise(torch_error.value).where == "host"  # type: ignore[union-attr]
    assert recognise(torch_error.value).requested_bytes == 1 << 60  # type: ignore[union-attr]
    assert recognise(numpy_error.value).where == "host"  # type: ignore[union-attr]


def test_an_oom_wrapped_in_another_error_is_found_and_a_sticky_one_rules() -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    assert recognise(wrapped) is not None
    wrapped.__cause__.__cause__ = RuntimeError("CUDA error: device-side assert triggered")
    assert recognise(wrapped) is None


def test_a_loop_of_causes_ends() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert recognise(first) is None


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB.", int(2.5 * GIB)),
        ("CUDA out of memory. Tried to allocate 20.00 MiB.", 20 * MIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_request_is_read_from_the_text(text: str, size: int | None) -> None:
    oom = recognise(RuntimeError(text))
    assert oom is not None
    assert oom.requested_bytes == size
