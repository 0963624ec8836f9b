"""Cards NVML does not know: AMD from the kernel's own files, Apple from the system, named as found and planned by memory only."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

from hfopt.schema import Gpu

_AMD_VENDOR = "0x1002"
_SMALLEST_CARD_BYTES = 2 << 30  # below that it is the graphics part of a processor, with a carve-out of the RAM


def amd_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Cards of the amdgpu driver, from /sys/class/drm."""
    found: list[Gpu] = []
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        if _read(device / "vendor") != _AMD_VENDOR:
            continue
        total, used = _integer(device / "mem_info_vram_total"), _integer(device / "mem_info_vram_used")
        if total is None or total < _SMALLEST_CARD_BYTES:
            continue
        name = _read(device / "product_name") or f"AMD GPU {_read(device / 'device') or ''}".strip()
        free = total - used if used is not None else None
        unique_id = _read(device / "unique_id")
        uuid = f"GPU-{unique_id}" if unique_id else None  # as rocminfo writes it
        found.append(Gpu(name=name, vendor="amd", memory_bytes=total, free_bytes=free, uuid=uuid, index=len(found)))
    return tuple(found)


def apple_gpus() -> tuple[Gpu, ...]:
    """The GPU of an Apple-silicon Mac. It shares the RAM; Metal lets a process take about three quarters of it by default."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return ()
    ram, chip = _sysctl("hw.memsize"), _sysctl("machdep.cpu.brand_string")
    if ram is None or not ram.isdigit():
        return ()
    return (Gpu(name=chip or "Apple silicon", vendor="apple", memory_bytes=int(ram), usable_bytes=int(ram) * 3 // 4, index=0),)


def _sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _integer(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None
