"""Did the kernel's OOM killer end a process of ours? The memory cgroup counts that, and the whole system does in /proc/vmstat."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def oom_kills(root: Path = _ROOT, own: Path = Path("/proc/self/cgroup"), system: Path = Path("/proc/vmstat")) -> int | None:
    """Kills so far in this process's memory cgroup (version 2 or 1), else in the system; None when neither says."""
    for file in [*_event_files(root, own), system]:
        try:
            text = file.read_text()
        except OSError:
            continue
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
