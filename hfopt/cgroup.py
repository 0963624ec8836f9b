"""The control groups of this process (version 1 or 2): what they allow, and whether the kernel's OOM killer ended a process of ours.

Limits are the tightest on the way from a group to the root of its hierarchy. Kills are counted by the memory cgroup, and for the whole
system in /proc/vmstat. The count of our own cgroup is proof. A child may stand in a cgroup below it, which version 1 does not add up: then
the system's count is taken, together with an end by SIGKILL.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_SYSTEM = Path("/proc/vmstat")


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """What the process's cgroups (v1 or v2, every level up to the root) allow; None is no limit."""

    cores: float | None = None
    ram_bytes: int | None = None
    ram_used_bytes: int | None = None  # of the group with the tightest limit, without its reclaimable page cache


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


def _memberships(own: Path) -> Iterator[tuple[str, str]]:
    """Each line of /proc/self/cgroup is 'id:controllers:path'; without controllers it is version 2."""
    for line in (_read(own) or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        yield controllers, path.strip().lstrip("/")


def _group_folders(root: Path) -> Iterator[Path]:
    """From each group up to the root of its hierarchy. Inside a container the path may not exist."""
    for controllers, inner in _memberships(root / "proc/self/cgroup"):
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        if controllers and not mount.is_dir():
            mount = root / "sys/fs/cgroup" / ("memory" if "memory" in controllers else "cpu")
        folder = mount / inner
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
    for line in (_read(file) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def _event_files(root: Path, own: Path) -> list[Path]:
    files: list[Path] = []
    for controllers, inner in _memberships(own):
        if controllers == "":
            files += [root / inner / "memory.events", root / "unified" / inner / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [root / "memory" / inner / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return files
