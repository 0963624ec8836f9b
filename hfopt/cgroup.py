"""Did the kernel's OOM killer end a process of ours? The memory cgroup counts that, and the whole system does in /proc/vmstat.

The count of our own cgroup is proof. A child may stand in a cgroup below it, which version 1 does not add up: then the system's count is
taken, together with an end by SIGKILL.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_SYSTEM = Path("/proc/vmstat")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kills:
    """So far; None where the kernel does not say."""

    own: int | None
    system: int | None


def oom_kills(root: Path = _ROOT, own: Path = _OWN, system: Path = _SYSTEM) -> Kills:
    """Of this process's memory cgroup (version 2 or 1), and of the whole system."""
    counts = (_count(file) for file in _event_files(root, own))
    return Kills(own=next((count for count in counts if count is not None), None), system=_count(system))


def killed_for_memory(before: Kills, after: Kills, exit_code: int) -> bool:
    """`exit_code` as a shell counts it."""
    return _rose(before.own, after.own) or (exit_code == 128 + signal.SIGKILL and _rose(before.system, after.system))


def _rose(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _count(file: Path) -> int | None:
    try:
        text = file.read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _event_files(root: Path, own: Path) -> list[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if controllers == "":
            files += [root / inner / "memory.events", root / "unified" / inner / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / inner / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return files
