"""A card this build of torch has no kernels for fails as it would there: "no kernel image is available for execution on the device".

Only in a rehearsal (HFOPT_VIRTUAL_STRICT=1): memory can be asked of any card, whether the installed torch still serves it or not.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable

import torch


def runs_on(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """CUDA's rule: a binary (sm_86) serves its own major version from its minor on, PTX (compute_80) every later card."""
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if match is None:
            continue
        built = int(match[2]), int(match[3])
        if built <= capability and (match[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def refuse_what_would_not_run() -> None:
    major, minor = os.environ["HFOPT_VIRTUAL_CAPABILITY"].split(".")
    built_for = (torch._C._cuda_getArchFlags() or "").split()
    if built_for and not runs_on((int(major), int(minor)), built_for):
        ctypes.CDLL(None).hfopt_virtual_refuse_kernels()
