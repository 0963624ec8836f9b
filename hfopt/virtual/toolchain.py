"""What the virtual GPU is built from: one environment's torch, its CUDA headers, and a C compiler.

Nothing here imports torch: its version and libraries are read from the files, so the check costs milliseconds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from hfopt.errors import VirtualGpuError

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
    facts = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^']*)'", (root / "version.py").read_text(), re.MULTILINE))
    version = facts.get("__version__", "unknown")
    if "cuda" not in facts or not (root / "lib" / "libtorch_cuda.so").exists():
        raise VirtualGpuError(
            f"the virtual GPU needs a CUDA build of torch; {version} in {root.parent} is CPU-only",
            hint="plain `pip install torch` on Linux brings the CUDA build",
        )
    return Torch(root=root, version=version, cuda=facts["cuda"])


def _torch_root(python: str | None) -> Path:
    if python is None or Path(python).absolute() == Path(sys.executable).absolute():
        spec = find_spec("torch")
        origin = spec.origin if spec is not None else None
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
