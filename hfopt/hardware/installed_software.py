"""What is installed: read from files without importing it, and asked of torch in a child."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from hfopt.compat.versions import TorchBuild, package_version, torch_build
from hfopt.schema import Gpu, Hardware, Problem

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
