"""Building: once, atomically, into a folder nobody else can write to, and one sentence when it cannot be."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hfopt.errors import VirtualGpuError
from hfopt.virtual import toolchain
from hfopt.virtual.build import SOURCES, libraries
from hfopt.virtual.launch import available


@pytest.mark.virtual_gpu
def test_builders_may_race_and_leave_nothing_else_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = toolchain.find_toolchain()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: libraries(found), range(2))
    assert first == second
    root = tmp_path / "hfopt" / "virtual"
    assert root.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in root.iterdir()] == [first.cuda.parent.name]
    assert sorted(path.name for path in first.cuda.parent.iterdir()) == ["libhfopt_cuda.so", "libhfopt_nvml.so"]
    built_at = first.cuda.stat().st_mtime_ns
    assert libraries(found).cuda.stat().st_mtime_ns == built_at


@pytest.mark.virtual_gpu
def test_a_cache_folder_that_ld_preload_cannot_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert " " not in str(libraries(toolchain.find_toolchain()).cuda)


@pytest.mark.virtual_gpu
def test_a_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = available()
    assert reason is not None and "no C compiler" in reason


@pytest.mark.virtual_gpu
def test_what_the_compiler_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'cc: broken today' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(VirtualGpuError, match="cc: broken today"):
        libraries(toolchain.find_toolchain())
    assert list((tmp_path / "cache" / "hfopt" / "virtual").iterdir()) == []


def test_a_cpu_only_build_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tmp_path / "torch"
    root.mkdir()
    (root / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    monkeypatch.setattr(toolchain, "_torch_root", lambda _: root)
    reason = available()
    assert reason is not None and "2.13.0+cpu" in reason and "CPU-only" in reason


def test_torch_is_found_for_another_interpreter_as_for_this_one() -> None:
    assert toolchain._torch_root(None) == toolchain._torch_root(f"{Path(sys.executable).parent}/./python")


def test_an_interpreter_that_does_not_exist_is_said() -> None:
    with pytest.raises(VirtualGpuError, match="cannot ask /nowhere/python"):
        toolchain._torch_root("/nowhere/python")


@pytest.mark.virtual_gpu
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda path: path.name)
def test_sources_compile_without_warnings(source: Path) -> None:
    found = toolchain.find_toolchain()
    flags = ["-Wall", "-Wextra", "-std=gnu11", "-fsyntax-only", f"-I{SOURCES}", *(f"-isystem{path}" for path in found.includes)]
    done = subprocess.run([found.compiler, *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""
