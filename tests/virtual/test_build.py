"""Building: once, atomically, into a folder nobody else can write to, and one sentence when it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hfopt.errors import VirtualGpuError
from hfopt.virtual import build, environment
from hfopt.virtual.build import SOURCES, libraries
from hfopt.virtual.environment import available


@pytest.mark.virtual_gpu
def test_builders_may_race_and_leave_nothing_else_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = build.find_toolchain()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: libraries(found), range(2))
    assert first == second
    root = tmp_path / "hfopt" / "virtual"
    assert root.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in root.iterdir()] == [first.cuda.parent.name]
    assert sorted(path.name for path in first.cuda.parent.iterdir()) == ["libcuda.so.1", "libhfopt_cuda.so", "libhfopt_nvml.so"]
    built_at = first.cuda.stat().st_mtime_ns
    assert libraries(found).cuda.stat().st_mtime_ns == built_at


@pytest.mark.virtual_gpu
def test_a_cache_folder_that_ld_preload_cannot_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "with space"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert " " not in str(libraries(build.find_toolchain()).cuda)


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
        libraries(build.find_toolchain())
    assert list((tmp_path / "cache" / "hfopt" / "virtual").iterdir()) == []


def test_a_cpu_only_build_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tmp_path / "torch"
    root.mkdir()
    (root / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n")
    monkeypatch.setattr(build, "_torch_root", lambda _: root)
    reason = available()
    assert reason is not None and "2.13.0+cpu" in reason and "CPU-only" in reason


def test_torch_is_found_for_another_interpreter_as_for_this_one() -> None:
    assert build._torch_root(None) == build._torch_root(f"{Path(sys.executable).parent}/./python")


def test_an_interpreter_that_does_not_exist_is_said() -> None:
    with pytest.raises(VirtualGpuError, match="cannot ask /nowhere/python"):
        build._torch_root("/nowhere/python")


@pytest.mark.virtual_gpu
@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.c")), ids=lambda path: path.name)
def test_sources_compile_without_warnings(source: Path) -> None:
    found = build.find_toolchain()
    flags = ["-Wall", "-Wextra", "-std=gnu11", "-fsyntax-only", f"-I{SOURCES}", *(f"-isystem{path}" for path in found.includes)]
    done = subprocess.run([found.compiler, *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == ""


def test_a_cache_folder_that_is_no_folder_or_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "hfopt" / "virtual"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert build._cache_root() == folder and folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(VirtualGpuError, match="belongs to another user"):
        build._cache_root()
    folder.rmdir()
    folder.parent.rmdir()
    folder.parent.write_text("a file")
    with pytest.raises(VirtualGpuError, match="cannot use the cache folder"):
        build._cache_root()


def test_a_place_that_cannot_be_built_in_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = None
    with pytest.raises(VirtualGpuError, match="cannot write to the cache folder"):
        build._build_into(tmp_path / "none" / "place", found)

    def no_room(work: Path, _: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "_compile", no_room)
    with pytest.raises(VirtualGpuError, match="No space left on device"):
        build._build_into(tmp_path / "place", found)
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_second_takes_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, found = tmp_path / "place", None
    monkeypatch.setattr(build, "_compile", lambda work, _: (work / "libhfopt_nvml.so").touch())
    build._build_into(place, found)  # type: ignore[arg-type]
    build._build_into(place, found)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["place"]
    (place / "libhfopt_nvml.so").rename(place / "something else")
    with pytest.raises(VirtualGpuError, match="cannot build the virtual GPU"):
        build._build_into(place, found)  # type: ignore[arg-type]


def test_an_interpreter_without_torch_and_a_torch_without_headers_are_said(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\n")
    silent.chmod(0o755)
    with pytest.raises(VirtualGpuError, match="torch is not installed for"):
        build._torch_root(str(silent))
    with pytest.raises(VirtualGpuError, match="needs the CUDA header"):
        build._find_includes(tmp_path)


def test_what_a_killed_launcher_left_is_swept_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"hfopt-{os.getuid()}"
    folder.mkdir(mode=0o700)
    for name, age_s in (("board-old", 25 * 3600), ("board-new", 3600)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    state = environment._new_state()
    assert [path.name for path in folder.iterdir()] == ["board-new"] and state.parent == folder
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    (tmp_path / "hfopt-4321").mkdir()
    with pytest.raises(VirtualGpuError, match="belongs to another user"):
        environment._new_state()


@pytest.mark.parametrize("how", ["of another user", "a link", "open to all"])
def test_a_library_that_others_may_have_written_is_not_loaded(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "torch-1"
    place.mkdir(mode=0o700)
    found = build.Libraries(cuda=place / "libhfopt_cuda.so", nvml=place / "libhfopt_nvml.so")
    found.cuda.touch()
    found.nvml.touch()
    found.nvml.chmod(0o775)
    build._check_untouched(place, found)  # written under a lax umask, in a folder that nobody else can enter
    if how == "of another user":
        monkeypatch.setattr(os, "getuid", lambda: 4321)
    elif how == "a link":
        found.cuda.unlink()
        found.cuda.symlink_to(found.nvml)
    else:
        place.chmod(0o755)
    with pytest.raises(VirtualGpuError, match="may have been written by somebody else"):
        build._check_untouched(place, found)
