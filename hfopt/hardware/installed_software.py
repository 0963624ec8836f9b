"""What is installed: read from files without importing it, asked of torch in a child, and whether torch has kernels for a card.

A build without them finds the card, fills it, and fails at the first kernel with "no kernel image is available".

What the installed torch itself says of the cards: asked in a child process, so that neither its import nor its faults are ours. The rest of
`doctor` reads files and the driver; only this shows that torch really reaches the card.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hfopt.compat.versions import TorchBuild, package_version, torch_build
from hfopt.schema import Gpu, Hardware, Problem

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


OPTIONAL_PACKAGES = ("flash-attn", "liger-kernel", "bitsandbytes", "peft", "deepspeed", "xformers", "triton")


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    torch: TorchBuild | None
    transformers: str | None
    accelerate: str | None
    nvidia_ml_py: str | None
    deprecated_pynvml: str | None
    optional: dict[str, str]  # those of OPTIONAL_PACKAGES that are installed


def installed() -> Software:
    return Software(
        torch=torch_build(),
        transformers=package_version("transformers"),
        accelerate=package_version("accelerate"),
        nvidia_ml_py=package_version("nvidia-ml-py"),
        deprecated_pynvml=package_version("pynvml"),
        optional={name: found for name in OPTIONAL_PACKAGES if (found := package_version(name))},
    )


LIMIT_S = 180.0

_QUESTIONS = """
import json, warnings
warnings.simplefilter("ignore")
answer = {"count": 0, "architectures": [], "bf16": None, "flash_attention": None, "error": None}
try:
    import torch
    answer["count"] = torch.cuda.device_count()
    if answer["count"]:
        torch.zeros(1, device="cuda")
        answer["architectures"] = torch.cuda.get_arch_list()
        answer["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        answer["flash_attention"] = torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability() >= (8, 0)
except Exception as error:
    answer["error"] = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
print(json.dumps(answer))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """torch's answers. `architectures` are those it has kernels for: sm_80, compute_120 (compiled on the spot), ..."""

    count: int
    architectures: tuple[str, ...] = ()
    bf16: bool | None = None
    flash_attention: bool | None = None
    error: str | None = None


def probe(python: str = sys.executable, *, limit_s: float = LIMIT_S) -> Probe:
    """Asks torch to find the cards and to put one number on the first."""
    try:
        result = subprocess.run([python, "-c", _QUESTIONS], capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return Probe(count=0, error=f"torch gave no answer within {limit_s:.0f} s")
    except OSError as error:
        return Probe(count=0, error=f"cannot start {python}: {error.strerror}")
    try:
        answer = json.loads(result.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        said = result.stderr.strip().splitlines()
        return Probe(count=0, error=f"torch ended with code {result.returncode}" + (f": {said[-1]}" if said else ""))
    return Probe(**{**answer, "architectures": tuple(answer["architectures"])})


def problems(hardware: Hardware, answer: Probe) -> Iterator[Problem]:
    """Where torch's answers and the driver's differ."""
    cards = [gpu for gpu in hardware.gpus if gpu.vendor == "nvidia"]
    if answer.error is not None:
        yield _error("torch_fails", f"torch fails on this machine: {answer.error}", "reinstall torch, or a driver that fits it")
    elif answer.count < len(cards):
        found = f"torch finds {answer.count} of the {len(cards)} GPUs the driver shows"
        yield _error("torch_misses_gpu", found, "python -c 'import torch; torch.zeros(1).cuda()' says why")
    for gpu in cards:
        if answer.architectures and not runs_on(gpu, answer.architectures):
            yield _error(
                "no_kernels",
                f"torch has no kernels for {gpu.name}: it is built for {', '.join(answer.architectures)}",
                "install another build",
            )


def runs_on(gpu: Gpu, architectures: tuple[str, ...]) -> bool:
    """Kernels run on their own major version from their minor version up; intermediate code (compute_*) on anything newer as well."""
    if gpu.capability is None:
        return True
    major, minor = gpu.capability
    for name in architectures:
        kind, _, number = name.rstrip("af").partition("_")
        if not number.isdigit():
            continue
        built = (int(number) // 10, int(number) % 10)
        if (kind == "sm" and built[0] == major and built[1] <= minor) or (kind == "compute" and built <= (major, minor)):
            return True
    return False


def _error(code: str, message: str, fix: str) -> Problem:
    return Problem(severity="error", code=code, key=None, place=None, message=message, fix=fix)
