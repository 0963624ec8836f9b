"""What the device's allocator says about memory, and giving back what it can."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNow:
    """All None on a device whose allocator keeps no books (the CPU)."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None  # what this process could have at most: reserved and free together


def read(device: torch.device) -> MemoryNow:
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return MemoryNow(allocated_bytes=allocated, reserved_bytes=reserved, capacity_bytes=min(reserved + free, limit))
    if device.type == "mps":
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        return MemoryNow(allocated_bytes=allocated, reserved_bytes=reserved, capacity_bytes=torch.mps.recommended_max_memory())
    return MemoryNow()


def clear(device: torch.device) -> None:
    """Frees what nobody holds: cycles, autocast's copies of the weights, cached blocks. A broken device shows here."""
    torch.clear_autocast_cache()
    gc.collect()
    module: Any = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None:
        module.synchronize()
        module.empty_cache()
