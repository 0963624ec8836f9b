"""The machine around the card, as far as this process may use it: cores by affinity and cgroup quota, memory by cgroup limit.

A container on a 64-core machine with a quota of 4 has 4 cores; reading os.cpu_count() there starts sixteen times too many workers.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hfopt.schema import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """What the process's cgroups (v1 or v2, every level up to the root) allow; None is no limit."""

    cores: float | None = None
    ram_bytes: int | None = None
    ram_used_bytes: int | None = None  # of the group with the tightest limit, without its reclaimable page cache


def host() -> Host:
    """Cores and memory this process may use."""
    import psutil

    memory = psutil.virtual_memory()
    limits = cgroup_limits()
    ram_bytes = min(memory.total, limits.ram_bytes or memory.total)
    free_bytes = memory.available
    if limits.ram_bytes is not None and limits.ram_bytes < memory.total:
        free_bytes = min(free_bytes, max(0, limits.ram_bytes - (limits.ram_used_bytes or 0)))
    return Host(cores=usable_cores(limits), ram_bytes=ram_bytes, ram_free_bytes=free_bytes, cpu_name=cpu_name())


def usable_cores(limits: CgroupLimits) -> float:
    """The smaller of the affinity mask and the quota; a quota may be a fraction of a core."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(float(allowed), limits.cores or float(allowed))


def cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The tightest limits on the way from this process's groups to the root of each hierarchy."""
    cores: list[float] = []
    memory: list[tuple[int, int | None]] = []
    for folder in _group_folders(root):
        if (quota := _cores(folder)) is not None:
            cores.append(quota)
        if (limit := _memory_limit(folder)) is not None:
            memory.append((limit, _memory_used(folder)))
    ram_bytes, used_bytes = min(memory, default=(None, None), key=lambda pair: pair[0])
    return CgroupLimits(cores=min(cores, default=None), ram_bytes=ram_bytes, ram_used_bytes=used_bytes)


def cpu_name(root: Path = Path("/")) -> str | None:
    text = _read(root / "proc/cpuinfo") or ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or None


def _group_folders(root: Path) -> Iterator[Path]:
    """Each line of /proc/self/cgroup is 'id:controllers:path'; without controllers it is v2. Inside a container the path may not exist."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        if controllers and not mount.is_dir():
            mount = root / "sys/fs/cgroup" / ("memory" if "memory" in controllers else "cpu")
        folder = mount / path.strip().lstrip("/")
        while folder.is_relative_to(mount):
            yield folder
            if folder == mount:
                break
            folder = folder.parent


def _cores(folder: Path) -> float | None:
    if text := _read(folder / "cpu.max"):  # v2: 'max 100000' or '200000 100000'
        quota, _, period = text.partition(" ")
        return None if quota == "max" else _positive(quota) / (_positive(period) or 100_000) or None
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_us and period_us and _positive(quota_us) and _positive(period_us):
        return _positive(quota_us) / _positive(period_us)
    return None


def _memory_limit(folder: Path) -> int | None:
    limits = [_positive(_read(folder / name) or "") for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    return min((limit for limit in limits if 0 < limit < 1 << 60), default=None)  # v1 writes 'no limit' as nearly 2**63


def _memory_used(folder: Path) -> int | None:
    used = _positive(_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes") or "")
    statistics = dict(line.split(" ", 1) for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
    cache = _positive(statistics.get("total_inactive_file") or statistics.get("inactive_file") or "")
    return max(0, used - cache) if used else None


def _positive(text: str) -> int:
    return int(text) if text.strip().isdigit() else 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
