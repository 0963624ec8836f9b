"""The machine around the card, as far as this process may use it: cores by affinity and cgroup quota, memory by cgroup limit.

A container on a 64-core machine with a quota of 4 has 4 cores; reading os.cpu_count() there starts sixteen times too many workers.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from hfopt.cgroup import CgroupLimits, cgroup_limits
from hfopt.schema import Host


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


def cpu_name(root: Path = Path("/")) -> str | None:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or None
