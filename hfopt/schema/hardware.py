"""The cards and the host: detected, or looked up in the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hfopt.schema.job import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card: from NVML and the catalog, or from the catalog alone (then uuid, free and driver facts are None)."""

    name: str
    vendor: Literal["nvidia", "amd", "apple"] = "nvidia"
    memory_bytes: int  # what the driver reports as total
    usable_bytes: int | None = None  # what CUDA shows a program as total (cudaMemGetInfo): without the driver's own part
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    sms: int | None = None
    bandwidth_bytes_per_s: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)  # dense, by 'fp32', 'tf32', 'fp16', 'bf16', 'fp8'
    power_limit_w: float | None = None
    pcie_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None  # total, one direction
    nvlink_by_bridge: bool = False  # it joins two cards, where the part was bought
    uuid: str | None = None
    index: int | None = None  # the driver's, as nvidia-smi shows it; CUDA's is the place in Hardware.gpus
    mig: bool = False
    catalog_name: str | None = None  # None: not in the catalog, planned by memory only
    source: str | None = None

    @property
    def available_bytes(self) -> int:
        """What a new process can take: what is free now, else what CUDA shows as total, else all of it."""
        return next(size for size in (self.free_bytes, self.usable_bytes, self.memory_bytes) if size is not None)

    def supports(self, precision: Precision) -> bool:
        """bf16 and tf32 need 8.0; fp16 tensor cores came with 7.0, before that fp16 saves memory only."""
        if precision in ("bf16", "tf32"):
            return self.capability is not None and self.capability >= (8, 0)
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the card, as far as this process may use it (affinity, cgroup)."""

    cores: float
    ram_bytes: int
    ram_free_bytes: int
    cpu_name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    gpus: tuple[Gpu, ...]  # () : the CPU is the device
    host: Host
    driver_version: str | None = None
    cuda_version: str | None = None
    notes: tuple[str, ...] = ()  # what was found odd, for the report
    hypothetical: bool = False  # the card was named, not detected

    @property
    def smallest(self) -> Gpu | None:
        """The card that rules: with several different ones, the one with the least memory."""
        return min(self.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
