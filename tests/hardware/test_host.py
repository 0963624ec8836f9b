"""Cores and memory as containers limit them: cgroup v1 and v2, every level counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfopt.cgroup import CgroupLimits, cgroup_limits
from hfopt.hardware.detect import cpu_name, host, usable_cores
from hfopt.units import GIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_v2_the_tightest_level_rules(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1\n",
            f"{group}/cpu.max": "max 100000\n",
            f"{group}/memory.max": f"{16 * GIB}\n",
            f"{group}/memory.current": f"{6 * GIB}\n",
            f"{group}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\n",
            "sys/fs/cgroup/kubepods/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/kubepods/memory.max": "max\n",
        },
    )
    assert cgroup_limits(root) == CgroupLimits(cores=2.5, ram_bytes=16 * GIB, ram_used_bytes=4 * GIB)


def test_v2_soft_limit_and_container_root(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/memory.high": f"{4 * GIB}\n"},
    )
    limits = cgroup_limits(root)
    assert limits.cores == 0.5 and limits.ram_bytes == 4 * GIB


def test_v1_with_a_path_the_container_cannot_see(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:freezer:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
        },
    )
    assert cgroup_limits(root) == CgroupLimits(cores=4.0, ram_bytes=8 * GIB, ram_used_bytes=2 * GIB)


@pytest.mark.parametrize("quota", ["-1", "", "rubbish"])
def test_v1_without_limits(tmp_path: Path, quota: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/\n5:memory:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert cgroup_limits(root) == CgroupLimits()


@pytest.mark.parametrize("text", ["", "rubbish\n", "0::\n", "::::\n"])
def test_odd_or_absent_cgroup_files_mean_no_limit(tmp_path: Path, text: str) -> None:
    assert cgroup_limits(write(tmp_path, {"proc/self/cgroup": text})) == CgroupLimits()
    assert cgroup_limits(tmp_path / "nothing") == CgroupLimits()


def test_affinity_and_quota_whichever_is_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert usable_cores(CgroupLimits()) == 4
    assert usable_cores(CgroupLimits(cores=1.5)) == 1.5
    assert usable_cores(CgroupLimits(cores=64.0)) == 4


def test_a_memory_limit_bounds_total_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host()
    assert 0 < here.ram_free_bytes <= here.ram_bytes and here.cores > 0
    limit = here.ram_bytes // 4
    monkeypatch.setattr("hfopt.hardware.detect.cgroup_limits", lambda: CgroupLimits(ram_bytes=limit, ram_used_bytes=limit // 2))
    bounded = host()
    assert bounded.ram_bytes == limit and bounded.ram_free_bytes <= limit - limit // 2


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    assert cpu_name(write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\n"})) == "Some CPU @ 3 GHz"
