"""What torch.compile needs to make kernels for the virtual GPU: Triton, its ptxas and Python's headers, all beside the run's own torch.

Nothing is imported: the files are looked at. What Inductor and Triton make there stays in a cache of its own, because the times of a card
that computes nothing must not choose kernels for one that does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hfopt.virtual.build import Torch

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
