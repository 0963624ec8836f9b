"""Is this error an out-of-memory error, and can the process go on after it?

Memory runs out in many places, and each says so in its own words: PyTorch's allocators, the CUDA runtime, cuBLAS, cuDNN and NCCL, ROCm,
Metal, oneAPI, XLA, the C++ heap and Python itself. `recognise` reads the exception and the causes it was raised from. A sticky CUDA error
(an illegal access, a failed assert in a kernel) breaks the context: nothing that runs on the device afterwards can be trusted, so it is
never taken for an OOM, whatever else the text says.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hfopt.units import parse_bytes

Where = Literal["device", "library", "communication", "host"]

RAISED_AS = (RuntimeError, MemoryError, OSError)
"""The classes an OOM can be raised as: torch.OutOfMemoryError, torch.AcceleratorError and dynamo's errors are RuntimeErrors."""

# what the message says -> where memory ran out; the first match wins
_FORMS: tuple[tuple[Where, str], ...] = (
    # NCCL's and RCCL's own allocations (misc/alloc in their sources); the communicator is unusable afterwards
    ("communication", r"(?:NCCL|RCCL).*(?:out of memory|Failed to (?:CUDA|HIP) (?:m|c)alloc)"),
    ("communication", r"nccl(?:UnhandledCuda|System)Error.*out of memory"),
    # libraries that keep a workspace of their own
    ("library", r"(?:CUBLAS|HIPBLAS|CUSPARSE|CUSOLVER|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED"),
    ("library", r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(?:Lt)?Create"),  # no room for the handle
    ("library", r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES|CUFFT_ALLOC_FAILED|HIPFFT_ALLOC_FAILED"),
    ("library", r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED)"),
    ("library", r"Unable to find a valid cuDNN algorithm|unable to find an engine to execute this computation"),  # none fits its workspace
    ("library", r"miopenStatusAllocFailed|rocblas_status_memory_error"),
    # the devices' allocators and runtimes
    (
        "device",
        r"\b(?:CUDA|HIP|XPU|NPU|MPS backend|MLU|MUSA|SDAA) (?:ran )?out of memory",
    ),  # ran: by cuDNN (torch 2.15)
    ("device", r"(?:CUDA|HIP)(?: driver)? error: out of memory|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|CUDA_ERROR_OUT_OF_MEMORY"),
    ("device", r"kIOGPUCommandBufferCallbackErrorOutOfMemory|Invalid buffer size: .* GB"),  # Metal
    ("device", r"(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES|HOST_MEMORY)"),  # oneAPI
    ("device", r"RESOURCE_EXHAUSTED|PT_DEVMEM Allocation failed"),  # XLA, Gaudi
    ("device", r"Allocation on device .* would exceed allowed memory"),  # PyTorch on a fraction set by set_per_process_memory_fraction
    ("device", r"\bout of memory at line\b"),  # bitsandbytes
    # the host
    ("host", r"can't allocate memory|DefaultCPUAllocator: not enough memory|std::bad_alloc|\bbad allocation\b"),
    ("host", r"Cannot allocate memory|unable to mmap \d+ bytes"),
)
_KNOWN = tuple((where, re.compile(text, re.DOTALL | re.IGNORECASE)) for where, text in _FORMS)

# cudaError values after which every later call fails (CUDA runtime API, "the process must be terminated and relaunched")
STICKY = re.compile(
    r"illegal memory access|(?<!enable )device-side assert|unspecified launch failure|misaligned address|illegal (?:instruction|address)"
    r"|invalid program counter|uncorrectable (?:NVLink|ECC) error|hardware stack error|unknown error|an illegal (?:barrier|instruction)"
    r"|GPU is lost|fallen off the bus|hipErrorLaunchFailure|hipErrorIllegalAddress",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"(?:Tried|you tried) to allocate (?P<size>\d+(?:\.\d+)?) ?(?P<unit>[KMGT]i?B|bytes)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Oom:
    """Memory ran out: where, what was asked for, and the error's own first line."""

    where: Where
    requested_bytes: int | None
    text: str

    @property
    def recoverable(self) -> bool:
        """A failed collective leaves a broken communicator, so only a new process helps."""
        return self.where != "communication"


def recognise(error: BaseException) -> Oom | None:
    """The OOM behind an error, or None when it is another kind of fault (or a sticky one)."""
    chain = list(_causes(error))
    if any(STICKY.search(str(link)) for link in chain):
        return None
    for link in chain:
        where = _where(link)
        if where is not None:
            text = str(link)
            return Oom(where=where, requested_bytes=_requested_bytes(text), text=text.strip().partition("\n")[0] or type(link).__name__)
    return None


def is_oom(error: BaseException | None) -> bool:
    return error is not None and recognise(error) is not None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was explicitly raised from, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _where(error: BaseException) -> Where | None:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "host"
    if not isinstance(error, RAISED_AS):
        return None
    where = where_in(str(error))
    if where is not None:
        return where
    return "device" if type(error).__name__ == "OutOfMemoryError" else None


def where_in(text: str) -> Where | None:
    """Where memory ran out, by a message alone."""
    return next((where for where, pattern in _KNOWN if pattern.search(text)), None)


def _requested_bytes(text: str) -> int | None:
    match = _REQUESTED.search(text)
    if match is None:
        return None
    unit = "b" if match["unit"].lower() == "bytes" else match["unit"]
    return parse_bytes(f"{match['size']} {unit}")


def without_frames(error: BaseException) -> BaseException:
    """The same error without its traceback, whose frames hold the step's tensors; its text is kept as a note."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    if hasattr(error, "add_note") and not getattr(error, "__notes__", None):
        error.add_note(f"It was first raised here:\n{text}")
    return error
