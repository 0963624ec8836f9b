"""Does the installed torch have kernels for a card? By its version and its CUDA, read from files; nothing is imported or asked.

A build without them finds the card, fills it, and fails at the first kernel with "no kernel image is available".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hfopt.compat.versions import TorchBuild
from hfopt.schema import Gpu

FIRST_CUDA_FOR = {(8, 0): (11, 0), (8, 6): (11, 1), (8, 7): (11, 4), (8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 8), (12, 0): (12, 8)}
"""The CUDA version that first compiles for a capability: CUDA Toolkit release notes, new architectures."""

_TURING, _VOLTA, _MAXWELL = (7, 5), (7, 0), (5, 0)
_LAST_FOR_OLD_CARDS = "2.14"
"""The last torch with CUDA 12.6 wheels, the only ones that kept Maxwell, Pascal and Volta (pytorch/pytorch#190385,
pytorch/test-infra#8739)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingKernels:
    code: Literal["card_too_old", "build_too_old"]
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message}; {self.fix}"


def missing_kernels(gpu: Gpu | None, build: TorchBuild | None) -> MissingKernels | None:
    """Why the build cannot run anything on the card, and which one can; None where it can, or where it is not known."""
    if gpu is None or gpu.vendor != "nvidia" or gpu.capability is None or build is None or build.cuda is None:
        return None
    cuda = numbers(build.cuda)
    without = f"torch {build.version} (CUDA {build.cuda}) has no kernels for {gpu.name} (capability {dotted(gpu.capability)})"
    least = _least_capability(build)
    if gpu.capability < least:
        fix = f"install torch {_LAST_FOR_OLD_CARDS} or older built for CUDA 12.6 (the cu126 wheels)"
        return MissingKernels(code="card_too_old", message=f"{without}: its kernels begin at {dotted(least)}", fix=fix)
    needs = max((first for capability, first in FIRST_CUDA_FOR.items() if capability <= gpu.capability), default=(0, 0))
    if cuda < needs:
        fix = f"install a torch built for CUDA {dotted(needs)} or newer"
        return MissingKernels(code="build_too_old", message=without, fix=fix)
    return None


def _least_capability(build: TorchBuild) -> tuple[int, int]:
    """CUDA 13 compiles for nothing before Turing. PyTorch's own CUDA 12.8 and 12.9 wheels left out Maxwell and Pascal from 2.8 on
    (pytorch/test-infra#7046) and Volta from 2.11 on (pytorch/pytorch#175253); who compiled torch himself chose for himself."""
    assert build.cuda is not None
    cuda, torch = numbers(build.cuda), numbers(build.version)
    if cuda >= (13, 0):
        return _TURING
    its_own = "+" not in build.version or "+cu" in build.version
    if not its_own or cuda < (12, 8) or torch < (2, 8):
        return _MAXWELL
    return _TURING if torch >= (2, 11) else _VOLTA


def numbers(text: str) -> tuple[int, int]:
    """'12.8' -> (12, 8); '2.9.0+cu128' -> (2, 9)."""
    parts = [int("".join(letter for letter in part if letter.isdigit()) or 0) for part in text.split("+")[0].split(".")]
    return (parts[0], parts[1] if len(parts) > 1 else 0)


def dotted(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"
