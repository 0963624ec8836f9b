"""Compiles the virtual GPU once per torch build and source version, into the user's cache folder, and finds what its compiler needs.

Nothing is imported: the files are looked at. What Inductor and Triton make there stays in a cache of its own, because the times of a card
that computes nothing must not choose kernels for one that does.

What the virtual GPU is built from: one environment's torch, its CUDA headers, and a C compiler. Nothing here imports torch: its version and
libraries are read from the files, so the check costs milliseconds.

Every symbol torch imports from CUDA's libraries that csrc/*.c does not define becomes a stub that returns success. A build happens
in a temporary folder next to its place and is renamed into it, so builders may race and a killed one leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hfopt import files
from hfopt.compat.versions import source_folder, torch_build
from hfopt.errors import VirtualGpuError

ATEN_ONLY = "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS"
REFUSED = "HFOPT_VIRTUAL_NO_COMPILE"
"""Set to the reason where nothing can be compiled: the run is then an eager one, and says so."""


def missing(torch: Torch, base: Mapping[str, str] = os.environ, python: str | None = None) -> str | None:
    """None when a compiled step can be made, else the sentence that says why not."""
    triton = torch.root.parent / "triton"
    if not triton.is_dir():
        return f"torch.compile needs Triton, which is not installed beside torch in {torch.root.parent}"
    named = base.get("TRITON_PTXAS_PATH")
    if not (Path(named) if named else triton / "backends" / "nvidia" / "bin" / "ptxas").is_file():
        return f"torch.compile needs ptxas, which {'TRITON_PTXAS_PATH names but' if named else 'Triton'} does not have"
    if not _headers(python).is_file():
        return f"Triton builds its launcher with Python's headers, and there is no {_headers(python)} (install python3-dev)"
    return None


def _headers(python: str | None) -> Path:
    folder = sysconfig.get_path("include")
    if python is not None and Path(python).absolute() != Path(sys.executable).absolute():
        code = "import sysconfig; print(sysconfig.get_path('include'))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        folder = done.stdout.strip().rpartition("\n")[2] or folder
    return Path(folder) / "Python.h"


def variables(torch: Torch, libraries: Path, base: Mapping[str, str], python: str | None = None) -> dict[str, str]:
    """The environment in which `torch.compile` works on the virtual GPU, or runs eagerly and says why."""
    refused = missing(torch, base, python)
    if refused is not None:
        return {"TORCHDYNAMO_DISABLE": "1", REFUSED: refused}
    return {
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_CACHE_DIR": str(libraries / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(libraries / "inductor"),
        ATEN_ONLY: "ATEN",
    }


_HEADERS = ("cuda_runtime_api.h", "cublas_v2.h", "cudnn.h", "nccl.h")


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """One environment's CUDA build of torch."""

    root: Path  # .../site-packages/torch
    version: str
    cuda: str

    @property
    def libraries(self) -> Path:
        return self.root / "lib"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    torch: Torch
    compiler: str
    nm: str
    includes: tuple[Path, ...]


def find_toolchain(python: str | None = None) -> Toolchain:
    """Everything the build needs, or one sentence on what is missing. `python` is the interpreter of the run, this one by default."""
    if sys.platform != "linux":
        raise VirtualGpuError(f"the virtual GPU runs on Linux only; this is {_system_name()}")
    torch = _find_torch(python)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    nm = shutil.which("nm")
    if compiler is None or nm is None:
        missing = "C compiler (cc, gcc or clang)" if compiler is None else "nm (GNU binutils)"
        raise VirtualGpuError(
            f"the virtual GPU is built on first use and found no {missing}", hint="install gcc, for example: apt install gcc"
        )
    return Toolchain(torch=torch, compiler=compiler, nm=nm, includes=_find_includes(torch.root.parent))


def _system_name() -> str:
    return {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)


def _find_torch(python: str | None) -> Torch:
    root = _torch_root(python)
    build = torch_build(root)
    version = build.version if build is not None else "unknown"
    if build is None or build.cuda is None or not (root / "lib" / "libtorch_cuda.so").exists():
        raise VirtualGpuError(
            f"the virtual GPU needs a CUDA build of torch; {version} in {root.parent} is CPU-only",
            hint="plain `pip install torch` on Linux brings the CUDA build",
        )
    return Torch(root=root, version=version, cuda=build.cuda)


def _torch_root(python: str | None) -> Path:
    if python is None or Path(python).absolute() == Path(sys.executable).absolute():
        folder = source_folder("torch")
        origin = str(folder / "__init__.py") if folder is not None else None
    else:
        code = "from importlib.util import find_spec as f; s = f('torch'); print(s.origin if s and s.origin else '')"
        try:
            answer = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise VirtualGpuError(f"cannot ask {python} where its torch is: {error}") from error
        origin = answer.stdout.strip().splitlines()[-1] if answer.stdout.strip() else None
    if not origin:
        raise VirtualGpuError(f"torch is not installed for {python or sys.executable}")
    return Path(origin).parent


def _find_includes(site: Path) -> tuple[Path, ...]:
    """The CUDA headers of the nvidia-* wheels that came with torch; `crt/` and cuda.h may be in triton's."""
    places: list[Path] = []
    for name in _HEADERS:
        found = next(iter(sorted(site.glob(f"nvidia/*/include/{name}"))), None)
        if found is None:
            raise VirtualGpuError(
                f"the virtual GPU needs the CUDA header {name}, which the nvidia-* packages next to torch ({site}) do not have",
                hint="install torch with pip (its nvidia-* dependencies bring the headers)",
            )
        places.append(found.parent)
    places += [path.parent.parent for path in sorted(site.glob("nvidia/*/include/crt/host_defines.h"))]
    places.append(site / "triton" / "backends" / "nvidia" / "include")
    return tuple(dict.fromkeys(places))


SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O2", "-fPIC", "-fvisibility=hidden", "-std=gnu11", "-w")
_NVML_SOURCES = ("nvml", "card", "board")

_TORCH_LIBRARIES = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_python.so",
    "libtorch_cpu.so",
    "libtorch_nvshmem.so",
    "libtorch_cuda_linalg.so",
    "libcaffe2_nvrtc.so",
)
_CUDA_NAME = re.compile(
    r"^(__cuda|cuda[A-Z]|cublas|cudnn|nccl[A-Z]|cu(Ctx|Device|Func|Get|Launch|Link|Module|Occupancy|Pointer|TensorMap))"
)
_NEEDS_NO_DEVICE = re.compile(
    r"^(cudnnGet(Version|CudartVersion|Property|ErrorString|LastErrorString)|ncclGet(Version|ErrorString|LastError))$"
)
_BITSANDBYTES_NEEDS = {"cudaMemPrefetchAsync"}
_TRITON_NEEDS = {"cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"}  # linked, and called on cards from 9.0 on for some kernels
# c10/cuda/driver_api.cpp of torch 2.6 wants all of its names in libcuda.so.1 at once, before it uses one of them.
_LOOKED_UP_BY_NAME = {
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemSetAccess",
    "cuMemsetD32Async",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuStreamWriteValue32",
}
# Success with the outputs left unset would be worse than an error.
_NOT_SUPPORTED = (
    (re.compile(r"^cudnn.*(RNN|CTC|Spatial|Find)"), 3000),
    (re.compile(r"^cuda(Ipc|Graph|Library|UserObject|StreamBeginCapture)"), 801),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Libraries:
    cuda: Path
    nvml: Path


def libraries(toolchain: Toolchain) -> Libraries:
    """The two libraries for this torch, built now if they are not in the cache."""
    place = _cache_root() / _key(toolchain)
    found = Libraries(cuda=place / "libhfopt_cuda.so", nvml=place / "libhfopt_nvml.so")
    if not (found.cuda.exists() and found.nvml.exists()):
        _build_into(place, toolchain)
    _check_untouched(place, found)
    return found


def _check_untouched(place: Path, found: Libraries) -> None:
    """What is loaded into the user's processes was written by this user, and nobody else could have written to it since."""
    private = place.lstat().st_mode & 0o077 == 0  # nobody else gets as far as the files
    for path in (place, found.cuda, found.nvml):
        status = path.lstat()
        open_to_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not private
        if status.st_uid != os.getuid() or stat.S_ISLNK(status.st_mode) or open_to_others:
            raise VirtualGpuError(
                f"{path} may have been written by somebody else and is not loaded", hint=f"remove {place}: it is built anew"
            )


def _key(toolchain: Toolchain) -> str:
    digest = hashlib.sha256(" ".join((*_FLAGS, *map(str, toolchain.includes))).encode())
    for source in (*sorted(SOURCES.iterdir()), Path(__file__)):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(str((toolchain.torch.libraries / "libtorch_cuda.so").stat().st_size).encode())
    return f"torch-{toolchain.torch.version}-{digest.hexdigest()[:16]}"


def _cache_root() -> Path:
    """A folder only this user can write to: what is in it gets loaded into their processes. LD_PRELOAD splits at spaces and colons."""
    root = files.location("virtual")
    if re.search(r"[\s:]", str(root)):
        root = files.own_temporary() / "virtual"
    try:
        files.make_private(root)
        status = root.stat()
    except OSError as error:
        raise VirtualGpuError(
            f"cannot use the cache folder {root}: {error.strerror}", hint="set XDG_CACHE_HOME to a folder of your own that you can write to"
        ) from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        root.chmod(0o700)
    return root


def _build_into(place: Path, toolchain: Toolchain) -> None:
    try:
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=place.parent))
    except OSError as error:
        raise VirtualGpuError(f"cannot write to the cache folder {place.parent}: {error.strerror}") from error
    try:
        _compile(work, toolchain)
        for leftover in work.glob("*.[co]"):
            leftover.unlink()
        try:
            work.rename(place)
        except OSError:  # another builder was first, with the same result
            if not (place / "libhfopt_nvml.so").exists():
                raise
    except OSError as error:
        raise VirtualGpuError(f"cannot build the virtual GPU in {place.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile(work: Path, toolchain: Toolchain) -> None:
    from concurrent.futures import ThreadPoolExecutor

    flags = (*_FLAGS, f"-I{SOURCES}", *(f"-I{path}" for path in toolchain.includes))
    sources = sorted(SOURCES.glob("*.c"))
    objects = {source.stem: work / f"{source.stem}.o" for source in sources}
    cuda = [path for stem, path in objects.items() if stem != "nvml"]
    stubs = work / "stubs.c"
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # somebody waits for the first plan
        imported = pool.map(partial(_undefined, toolchain), _TORCH_LIBRARIES)
        for _ in pool.map(lambda one: _run(toolchain.compiler, *flags, "-c", str(one), "-o", str(objects[one.stem])), sources):
            pass
        stubs.write_text(_stub_source(cuda, toolchain, set().union(*imported)))
    _run(toolchain.compiler, *flags, "-c", str(stubs), "-o", str(work / "stubs.o"))
    # The sonames are what libcaffe2_nvrtc.so and the dlopen calls of torch and pynvml look for.
    _link(toolchain, work / "libhfopt_cuda.so", "libcuda.so.1", [*cuda, work / "stubs.o"])
    (work / "libcuda.so.1").symlink_to("libhfopt_cuda.so")  # the name that Triton's driver links (TRITON_LIBCUDA_PATH)
    _link(toolchain, work / "libhfopt_nvml.so", "libnvidia-ml.so.1", [objects[stem] for stem in _NVML_SOURCES])


def _link(toolchain: Toolchain, output: Path, soname: str, objects: list[Path]) -> None:
    _run(toolchain.compiler, "-shared", "-o", str(output), *map(str, objects), f"-Wl,-soname,{soname}", "-lpthread", "-ldl")


def _undefined(toolchain: Toolchain, name: str) -> set[str]:
    """What this library of torch's wants of CUDA's."""
    path = toolchain.torch.libraries / name
    lines = _run(toolchain.nm, "-D", "--undefined-only", str(path)).splitlines() if path.exists() else []
    return {symbol for line in lines if _CUDA_NAME.match(symbol := line.split()[-1].split("@")[0])}


def _stub_source(objects: list[Path], toolchain: Toolchain, imported: set[str]) -> str:
    listed = [line.split() for line in _run(toolchain.nm, "--defined-only", "-g", *map(str, objects)).splitlines()]
    defined = {words[-1] for words in listed if len(words) > 1}  # the others name the file
    needed = imported | _BITSANDBYTES_NEEDS | _TRITON_NEEDS | _LOOKED_UP_BY_NAME
    lines = [
        '#include "stub.h"',
        '#define STUB(f, result) __attribute__((visibility("default"))) int f(void) { return stub_called(#f, result); }',
    ]
    for symbol in sorted(needed - defined):
        if not _NEEDS_NO_DEVICE.match(symbol):
            lines.append(f"STUB({symbol}, {next((code for pattern, code in _NOT_SUPPORTED if pattern.match(symbol)), 0)})")
    return "\n".join(lines) + "\n"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise VirtualGpuError(f"the virtual GPU could not be built: {Path(command[0]).name} said: {said[0] if said else done.returncode}")
    return done.stdout
