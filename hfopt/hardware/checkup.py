"""A look at this machine for `hfopt doctor`: what is installed, and what of it all would slow training or keep it off the card.

The findings are pure judgements over what was detected, each with what to do about it. An error keeps training off the GPU, a warning slows
it or may stop it, a note is worth knowing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from hfopt.compat.versions import TorchBuild, dotted, missing_kernels, numbers, package_version, torch_build
from hfopt.hardware import catalog, nvml
from hfopt.hardware.detect import detect
from hfopt.schema import Gpu, Hardware, Problem
from hfopt.units import GIB, format_bytes

OPTIONAL_PACKAGES = ("flash-attn", "liger-kernel", "bitsandbytes", "peft", "deepspeed", "xformers", "triton")
LIMIT_S = 180.0  # for torch's answers


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


def disagreements(hardware: Hardware, answer: Probe) -> Iterator[Problem]:
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


OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver for any build of a CUDA major version: CUDA Toolkit release notes, minor version compatibility."""

_SLOW_SETTINGS = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before it to end; it is for debugging"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every tensor is a cudaMalloc; it is for debugging"),
    "NVIDIA_TF32_OVERRIDE": ("0", "TF32 is switched off for every library"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is checked against the other ranks; it is for debugging"),
    "NCCL_P2P_DISABLE": ("1", "cards talk to each other through host memory"),
}
_SMALL_SHARED_MEMORY_BYTES = GIB
_CORES_PER_GPU = 2  # the process that launches kernels and one that loads data


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What else bears on speed. `readings` holds what each card reports at the moment, by UUID."""

    environment: Mapping[str, str]
    shared_memory_bytes: int | None = None  # /dev/shm, through which loader workers hand over batches
    nvidia_on_bus: bool = False
    nvml_problem: str | None = None
    throttle: Mapping[str, tuple[str, ...]] | None = None
    lanes: Mapping[str, tuple[int, int]] | None = None  # PCIe lanes in use and possible


def findings(hardware: Hardware, software: Software, around: Surroundings) -> tuple[Problem, ...]:
    """Everything worth telling, the worst first."""
    found = [*_driver(hardware, software, around), *_packages(hardware, software), *_host(hardware, around)]
    for gpu in hardware.gpus:
        found += [*_card(gpu, around), *_build_for(gpu, software.torch)]
    found += [_problem("note", "note", note) for note in hardware.notes]
    order = ("error", "warning", "note")
    unique = {(problem.code, problem.message): problem for problem in found}
    return tuple(sorted(unique.values(), key=lambda problem: order.index(problem.severity)))


def _problem(severity: Literal["error", "warning", "note"], code: str, message: str, fix: str | None = None) -> Problem:
    return Problem(severity=severity, code=code, key=None, place=None, message=message, fix=fix)


def _driver(hardware: Hardware, software: Software, around: Surroundings) -> Iterator[Problem]:
    if around.nvidia_on_bus and around.nvml_problem:
        yield _problem(
            "error",
            "driver_unreachable",
            f"an NVIDIA card is on the bus, but its driver does not answer: {around.nvml_problem}",
            "load or install the driver; after an update of the driver, reboot; in a container, start it with --gpus all",
        )
    build = software.torch
    if not (build and build.cuda and hardware.cuda_version):
        return
    needs, has = numbers(build.cuda), numbers(hardware.cuda_version)
    if has[0] < needs[0]:
        oldest = OLDEST_DRIVER.get(needs[0])
        yield _problem(
            "error",
            "driver_too_old",
            f"driver {hardware.driver_version} runs at most CUDA {hardware.cuda_version}; torch {build.version} is built for {build.cuda}",
            f"update the driver{f' to {oldest} or newer' if oldest else ''}, or install a torch built for CUDA {has[0]}",
        )
    elif has < needs:
        yield _problem(
            "note",
            "driver_older",
            f"torch is built for CUDA {build.cuda}, the driver is of {hardware.cuda_version}: it runs, but kernels that are "
            "compiled on the spot (torch.compile, Triton) may need a newer driver",
        )


def _packages(hardware: Hardware, software: Software) -> Iterator[Problem]:
    nvidia = any(gpu.vendor == "nvidia" for gpu in hardware.gpus)
    if software.torch is None:
        yield _problem("error", "no_torch", "torch is not installed", "pip install torch")
    elif software.torch.cpu_only and nvidia:
        yield _problem(
            "error",
            "cpu_only_torch",
            f"torch {software.torch.version} is a CPU-only build: training would leave the GPU idle",
            "pip install --force-reinstall torch (the plain package has the CUDA build on Linux)",
        )
    if software.deprecated_pynvml:
        yield _problem(
            "warning",
            "deprecated_pynvml",
            f"the deprecated package pynvml {software.deprecated_pynvml} is installed; it stands in the way of nvidia-ml-py",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    if software.nvidia_ml_py is None:
        yield _problem(
            "warning", "no_nvidia_ml_py", "nvidia-ml-py is not installed: the card cannot be watched", "pip install nvidia-ml-py"
        )


def _host(hardware: Hardware, around: Surroundings) -> Iterator[Problem]:
    cards = max(1, len(hardware.gpus))
    if hardware.gpus and hardware.host.cores < _CORES_PER_GPU * cards:
        yield _problem(
            "warning",
            "few_cores",
            f"{hardware.host.cores:g} cores for {len(hardware.gpus)} GPU(s): one is to launch kernels and one to load data for each",
            "give the container more cores (docker --cpus, Slurm --cpus-per-task), or tokenize the dataset beforehand",
        )
    gpu_bytes = sum(gpu.memory_bytes for gpu in hardware.gpus if gpu.vendor == "nvidia")
    if gpu_bytes and hardware.host.ram_bytes < gpu_bytes / 2:
        ram, total = format_bytes(hardware.host.ram_bytes), format_bytes(gpu_bytes)
        yield _problem("note", "little_ram", f"{ram} of RAM beside {total} of GPU memory: loading and saving large models may not fit")
    if around.shared_memory_bytes is not None and around.shared_memory_bytes < _SMALL_SHARED_MEMORY_BYTES:
        yield _problem(
            "warning",
            "small_shared_memory",
            f"/dev/shm has {format_bytes(around.shared_memory_bytes)}: loader workers hand batches over through it and die when it is full",
            "docker run --shm-size=8g (or --ipc=host)",
        )
    for name, (bad, why) in _SLOW_SETTINGS.items():
        if around.environment.get(name) == bad:
            yield _problem("warning", "slow_setting", f"{name}={bad}: {why}", f"unset {name}")


def _card(gpu: Gpu, around: Surroundings) -> Iterator[Problem]:
    held = gpu.memory_bytes - (gpu.free_bytes or 0) - (gpu.memory_bytes - (gpu.usable_bytes or gpu.memory_bytes))
    if gpu.free_bytes is not None and held > 0.1 * gpu.memory_bytes:
        yield _problem("warning", "shared_card", f"{gpu.name}: {format_bytes(held)} are held by other processes", "nvidia-smi shows which")
    known = catalog.find(gpu.catalog_name) if gpu.catalog_name else None
    if known and not gpu.mig and gpu.power_limit_w and known.power_limit_w and gpu.power_limit_w < 0.9 * known.power_limit_w:
        message = f"{gpu.name}: the power limit is {gpu.power_limit_w:.0f} W, the catalog's speed is for {known.power_limit_w:.0f} W"
        yield _problem("note", "power_limit", message, "nvidia-smi -pl raises it where the maker allows")
    if reasons := (around.throttle or {}).get(gpu.uuid or ""):
        yield _problem("warning", "throttled", f"{gpu.name} holds its clocks down now: {', '.join(reasons)}", "check cooling and power")
    used, possible = (around.lanes or {}).get(gpu.uuid or "", (0, 0))
    if used < possible:
        yield _problem("warning", "pcie_lanes", f"{gpu.name} uses {used} of {possible} PCIe lanes", "another slot, or a riser's seat")
    if gpu.vendor == "nvidia" and gpu.capability and not gpu.supports("bf16"):
        need = "bf16 and TF32 need compute capability 8.0"
        fp16 = "use fp16" if gpu.capability >= (7, 0) else "fp16 saves memory here, but no time"
        yield _problem("note", "no_bf16", f"{gpu.name} ({dotted(gpu.capability)}): {need}; {fp16}")


def _build_for(gpu: Gpu, build: TorchBuild | None) -> Iterator[Problem]:
    if (missing := missing_kernels(gpu, build)) is not None:
        yield _problem("error", missing.code, missing.message, missing.fix)


_NVIDIA_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    hardware: Hardware
    software: Software
    nvml_problem: str | None  # None: the driver answers
    problems: tuple[Problem, ...]
    probe: Probe | None = None  # None: torch was not asked


class CardSupport(TypedDict):
    """What one card computes with tensor cores or kernels of its own; null: unknown."""

    uuid: str | None
    bf16: bool
    tf32: bool
    flash_attention: bool | None


class DoctorOutput(TypedDict):
    """What training would run on here, and what would slow it."""

    hardware: Hardware
    software: Software
    nvml_problem: str | None
    problems: Sequence[Problem]
    probe: Probe | None
    support: Sequence[CardSupport]


def checkup(*, ask_torch: bool = False) -> Checkup:
    hardware, software = detect(), installed()
    around = _surroundings(hardware.gpus)
    problems = findings(hardware, software, around)
    answer = probe() if ask_torch else None
    if answer is not None:
        known = {problem.code for problem in problems}
        reported = known & {"card_too_old", "build_too_old"}  # with the build that would do
        problems = (*(problem for problem in disagreements(hardware, answer) if problem.code != "no_kernels" or not reported), *problems)
    return Checkup(hardware=hardware, software=software, nvml_problem=around.nvml_problem, problems=problems, probe=answer)


def flash_attention(gpu: Gpu) -> bool | None:
    """Whether PyTorch's own scaled_dot_product_attention has a flash kernel for the card (sdp_utils.cpp: sm_80 and up)."""
    return None if gpu.capability is None else gpu.capability >= (8, 0)


def _surroundings(gpus: tuple[Gpu, ...]) -> Surroundings:
    shown = {gpu.uuid for gpu in gpus}
    throttle: dict[str, tuple[str, ...]] = {}
    lanes: dict[str, tuple[int, int]] = {}
    session = nvml.connect()
    if isinstance(session, nvml.NvmlSession):
        for device in session.devices():
            reading = device.reading() if device.uuid in shown else None
            if reading is not None:
                throttle[device.uuid] = reading.throttle
            if device.pcie and device.max_pcie_lanes:
                lanes[device.uuid] = (device.pcie[1], device.max_pcie_lanes)
        session.close()
    return Surroundings(
        environment=os.environ,
        shared_memory_bytes=_shared_memory_bytes(),
        nvidia_on_bus=nvidia_on_bus(),
        nvml_problem=session.reason if isinstance(session, nvml.Unreachable) else None,
        throttle=throttle,
        lanes=lanes,
    )


def nvidia_on_bus(root: Path = Path("/")) -> bool:
    """Whether an NVIDIA display device is plugged in, driver or not."""
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == _NVIDIA_VENDOR and vendor.with_name("class").read_text().startswith(_DISPLAY_CLASS):
                return True
        except OSError:
            continue
    return False


def _shared_memory_bytes() -> int | None:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None
