"""Which of the kernels in this build of torch the card would load.

CUB asks a kernel for its architecture and takes the variant compiled for it; an architecture torch was not built for (8.9 where there
is sm_86) is "invalid device function". A card torch has no kernels for at all fails only in a rehearsal (HFOPT_VIRTUAL_STRICT=1), with
"no kernel image is available for execution on the device": memory can be asked of any card, whether the installed torch still serves it
or not.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable

import torch

Capability = tuple[int, int]


def _architectures(built_for: Iterable[str]) -> list[tuple[Capability, bool]]:
    """Each architecture, and whether it is PTX."""
    matches = (re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name) for name in built_for)
    return [((int(match[2]), int(match[3])), match[1] == "compute") for match in matches if match]


def loaded_on(capability: Capability, built_for: Iterable[str]) -> Capability | None:
    """CUDA's rule: a binary (sm_86) serves its own major version from its minor on, PTX (compute_80) every later card."""
    serving = [(not ptx, built) for built, ptx in _architectures(built_for) if built <= capability and (ptx or built[0] == capability[0])]
    return max(serving)[1] if serving else None


def choose() -> None:
    """Tells the library; where nothing fits and that is no error, the kernels of the oldest architecture stand in."""
    major, minor = os.environ["HFOPT_VIRTUAL_CAPABILITY"].split(".")
    built_for = (torch._C._cuda_getArchFlags() or "").split()
    if not built_for:
        return
    library = ctypes.CDLL(None)
    loaded = loaded_on((int(major), int(minor)), built_for)
    if loaded is None and os.environ.get("HFOPT_VIRTUAL_STRICT") == "1":
        library.hfopt_virtual_refuse_kernels()
    of = loaded or min(built for built, _ in _architectures(built_for))
    library.hfopt_virtual_kernels_of(of[0] * 10 + of[1])
