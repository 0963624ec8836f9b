"""What there is to train on: the cards CUDA shows this process, those of other vendors, a card that is named, and the host around them.

A container on a 64-core machine with a quota of 4 has 4 cores; reading os.cpu_count() there starts sixteen times too many workers.

Which of the machine's cards CUDA shows this process: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, read as the driver reads them. Unset shows
all, empty shows none. Entries are indices, or prefixes of a UUID (GPU-..., MIG-...), all of the kind of the first. The first entry that
names no card hides itself and all after it ('0,-1,1' shows one card); a card given twice, or a prefix that fits two, shows none. Indices
count in CUDA's order: the fastest card first and the others by PCI bus, unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Of MIG instances CUDA shows
one process one; indices do not reach them while there are whole cards.

Cards NVML does not know: AMD from the kernel's own files, Apple from the system, named as found and planned by memory only. detect()
imports neither torch nor any CUDA library: NVML says what is there, the catalog what it can do.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hfopt.cgroup import CgroupLimits, cgroup_limits
from hfopt.errors import HardwareError
from hfopt.hardware import catalog, nvml
from hfopt.hardware.catalog import PCIE_BYTES_PER_S_PER_LANE
from hfopt.schema import Gpu, Hardware, Host
from hfopt.units import GIB, format_bytes


def host() -> Host:
    """Cores and memory this process may use."""
    import psutil

    memory = psutil.virtual_memory()
    limits = cgroup_limits()
    ram_bytes = min(memory.total, limits.ram_bytes or memory.total)
    free_bytes = memory.available
    if limits.ram_bytes is not None and limits.ram_bytes < memory.total:
        free_bytes = min(free_bytes, max(0, limits.ram_bytes - (limits.ram_used_bytes or 0)))
    return Host(cores=usable_cores(limits), ram_bytes=ram_bytes, ram_free_bytes=free_bytes, cpu_name=cpu_name())


def usable_cores(limits: CgroupLimits) -> float:
    """The smaller of the affinity mask and the quota; a quota may be a fraction of a core."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(float(allowed), limits.cores or float(allowed))


def cpu_name(root: Path = Path("/")) -> str | None:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A card or MIG instance as the driver lists it."""

    uuid: str
    speed: float = 0.0  # any measure by which cards compare
    mig: bool = False
    legacy_uuid: str | None = None  # MIG-GPU-<card>/<gpu instance>/<compute instance>, before driver 470
    split: bool = False  # a card in MIG mode: CUDA shows its instances, not the card


def visible(listed: Sequence[Listed], environment: Mapping[str, str]) -> tuple[Listed, ...]:
    """The devices CUDA shows, in CUDA's order."""
    ordered = _cuda_order(listed, environment)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    whole = [device for device in ordered if not device.mig and not device.split]
    instances = [device for device in ordered if device.mig]
    if wanted is None:
        return tuple(whole or instances[:1])
    chosen: list[Listed] = []
    entries = [entry.strip() for entry in wanted.split(",")]
    for entry in entries:
        fitting = _fitting(entry, whole or instances[:1], ordered)
        if not fitting or _kind(entry) != _kind(entries[0]):
            break
        if len(fitting) > 1 or fitting[0] in chosen:
            return ()
        chosen.append(fitting[0])
    if any(device.mig for device in chosen):
        return tuple(device for device in chosen if device.mig)[:1]
    return tuple(chosen)


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index"


def _fitting(entry: str, by_index: Sequence[Listed], ordered: Sequence[Listed]) -> list[Listed]:
    if _kind(entry) != "index":
        named = [device for device in ordered if device.uuid.startswith(entry) or (device.legacy_uuid or "").startswith(entry)]
        if entry.startswith("GPU-"):  # a card in MIG mode stands for its first instance
            named = [by_index[0] if device.split and by_index and by_index[0].mig else device for device in named]
        return named
    index = _leading_integer(entry)
    return [by_index[index]] if index is not None and 0 <= index < len(by_index) else []


def _leading_integer(entry: str) -> int | None:
    """As strtol reads it: '1' and '+1' are 1, '1x' is 1, 'x' is nothing."""
    sign, digits = (entry[:1], entry[1:]) if entry[:1] in ("+", "-") else ("", entry)
    length = next((place for place, letter in enumerate(digits) if letter not in "0123456789"), len(digits))
    return int(sign + digits[:length]) if length else None


def _cuda_order(listed: Sequence[Listed], environment: Mapping[str, str]) -> list[Listed]:
    cards = [device for device in listed if not device.mig]
    if environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST").upper() == "PCI_BUS_ID" or not cards:
        return list(listed)
    fastest = max(cards, key=lambda device: device.speed)  # the first of equals
    return [fastest, *(device for device in listed if device is not fastest)]


_AMD_VENDOR = "0x1002"
_SMALLEST_CARD_BYTES = 2 << 30  # below that it is the graphics part of a processor, with a carve-out of the RAM


def amd_gpus(root: Path = Path("/")) -> tuple[Gpu, ...]:
    """Cards of the amdgpu driver, from /sys/class/drm."""
    found: list[Gpu] = []
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        if _read(device / "vendor") != _AMD_VENDOR:
            continue
        total, used = _integer(device / "mem_info_vram_total"), _integer(device / "mem_info_vram_used")
        if total is None or total < _SMALLEST_CARD_BYTES:
            continue
        name = _read(device / "product_name") or f"AMD GPU {_read(device / 'device') or ''}".strip()
        free = total - used if used is not None else None
        unique_id = _read(device / "unique_id")
        uuid = f"GPU-{unique_id}" if unique_id else None  # as rocminfo writes it
        found.append(Gpu(name=name, vendor="amd", memory_bytes=total, free_bytes=free, uuid=uuid, index=len(found)))
    return tuple(found)


def apple_gpus() -> tuple[Gpu, ...]:
    """The GPU of an Apple-silicon Mac. It shares the RAM; Metal lets a process take about three quarters of it by default."""
    if (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return ()
    ram, chip = _sysctl("hw.memsize"), _sysctl("machdep.cpu.brand_string")
    if ram is None or not ram.isdigit():
        return ()
    return (Gpu(name=chip or "Apple silicon", vendor="apple", memory_bytes=int(ram), usable_bytes=int(ram) * 3 // 4, index=0),)


def _sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _integer(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def detect() -> Hardware:
    """The cards this process may use and the host; no cards means that the CPU is the device."""
    session = nvml.connect()
    if isinstance(session, nvml.Unreachable):
        return _without_nvidia(session)
    try:
        if not session.count and (others := _without_nvidia()).gpus:
            return others
        gpus, notes = _nvidia_gpus(session, os.environ)
        driver_version, cuda_version = session.driver_version, session.cuda_version
    finally:
        session.close()
    return Hardware(
        gpus=gpus,
        host=host(),
        driver_version=driver_version,
        cuda_version=cuda_version,
        notes=(*notes, *_remarks(gpus)),
    )


def named(name: str, *, count: int = 1, memory_bytes: int | None = None) -> Hardware:
    """A card that need not be here, `count` times, beside this host.

    A memory size tells variants apart; one that the card is not sold with counts instead of its own, to the byte. With a memory size,
    a card that is not in the catalog is planned by memory only.
    """
    if count < 1:
        raise HardwareError(f"{count} cards of '{name}' cannot train; give 1 or more")
    if name.strip().lower() == "cpu":
        return Hardware(gpus=(), host=host(), hypothetical=True)
    try:
        match = catalog.lookup(name, memory_bytes=memory_bytes)
    except catalog.UnknownCardError as error:
        if memory_bytes is None:
            raise
        note = f"'{name}' is not in the catalog: planned by memory only, without speed ({error.hint})"
        match = catalog.Match(gpu=Gpu(name=name, memory_bytes=memory_bytes), note=note)
    gpu, notes = match.gpu, [match.note] if match.note else []
    if memory_bytes is not None and not _is_its_size(gpu, memory_bytes):
        notes.append(f"{gpu.name} has {format_bytes(gpu.memory_bytes)}; planned with {format_bytes(memory_bytes)} as asked")
        gpu = replace(gpu, memory_bytes=memory_bytes, usable_bytes=None)
    return Hardware(gpus=(gpu,) * count, host=host(), notes=tuple(notes), hypothetical=True)


def _is_its_size(gpu: Gpu, memory_bytes: int) -> bool:
    return memory_bytes >= gpu.memory_bytes and catalog.is_sold_as(gpu.memory_bytes, memory_bytes / GIB)


def _without_nvidia(why: nvml.Unreachable | None = None) -> Hardware:
    gpus = _visible_amd(amd_gpus(), os.environ) or apple_gpus()
    notes = [*_remarks(gpus)]
    if not gpus:
        notes.append("no GPU was found: the CPU is the device")
    if why and (why.kind not in ("no_library", "no_binding") or (why.kind == "no_binding" and not gpus)):
        notes.append(f"NVML does not answer: {why.reason}")
    return Hardware(gpus=gpus, host=host(), notes=tuple(notes))


def _visible_amd(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES are lists of indices or UUIDs like CUDA's; HIP also honours CUDA's own."""
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if (wanted := environment.get(variable)) is not None:
            listed = [Listed(uuid=gpu.uuid or f"GPU-{place}") for place, gpu in enumerate(gpus)]
            return tuple(gpus[listed.index(one)] for one in visible(listed, {"CUDA_VISIBLE_DEVICES": wanted}))
    return gpus


def _nvidia_gpus(session: nvml.NvmlSession, environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], list[str]]:
    """The visible cards in CUDA's order, and what is to be said about the others."""
    notes: list[str] = []
    found: dict[str, Gpu] = {}
    listed: list[Listed] = []
    for device in session.devices():
        for part in (device, *device.instances()):
            gpu = _gpu(part)
            if gpu is None:
                continue
            found[part.uuid] = gpu
            listed.append(
                Listed(
                    uuid=part.uuid,
                    speed=gpu.peak_flops.get("fp32", 0.0),
                    mig=gpu.mig,
                    legacy_uuid=part.legacy_mig_uuid,
                    split=device.mig_enabled and part is device,
                )
            )
    if missing := session.count - sum(not one.mig for one in listed):
        notes.append(f"{missing} of the driver's {session.count} cards do not answer (fallen off the bus?) and are left out")
    shown = visible(listed, environment)
    hidden = [one.uuid for one in listed if one not in shown and not one.split]
    if hidden and (wanted := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        notes.append(f"CUDA_VISIBLE_DEVICES={wanted!r} hides {len(hidden)} of {len(hidden) + len(shown)} devices")
    elif hidden:
        notes.append(f"CUDA shows a process one MIG instance or the whole cards: {len(hidden)} devices are out of reach")
    if not shown:
        notes.append("no GPU is visible to this process: the CPU is the device")
    return tuple(found[one.uuid] for one in shown), notes


def _gpu(device: nvml.NvmlDevice) -> Gpu | None:
    """What the driver says, completed from the catalog; the driver's word comes first."""
    memory, name = device.memory() or _shared_memory(device), device.name
    if memory is None or name is None:
        return None
    chip = device.parent or device
    chip_memory = chip.memory() or memory
    known = catalog.identify(chip.name or name, chip_memory.total_bytes)
    gpu = Gpu(
        name=name,
        memory_bytes=memory.total_bytes,
        usable_bytes=memory.total_bytes - memory.reserved_bytes if memory.reserved_bytes is not None else None,
        free_bytes=memory.free_bytes,
        capability=device.capability,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        power_limit_w=device.power_limit_w,
        pcie_bytes_per_s=_pcie_bytes_per_s(chip),
        uuid=device.uuid,
        index=device.index,
        mig=device.parent is not None,
    )
    if known is None:
        return catalog.estimated(gpu, cores=device.cores, clock_mhz=device.max_sm_clock_mhz)
    gpu = replace(
        gpu,
        capability=gpu.capability or known.capability,
        sms=known.sms,
        usable_bytes=gpu.usable_bytes if gpu.usable_bytes is not None or device.parent else known.usable_bytes,
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s,
        peak_flops=known.peak_flops,
        power_limit_w=gpu.power_limit_w or known.power_limit_w,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s or known.pcie_bytes_per_s,
        nvlink_bytes_per_s=known.nvlink_bytes_per_s if chip.active_nvlinks else None,
        nvlink_by_bridge=known.nvlink_by_bridge,
        catalog_name=known.name,
        source=known.source,
    )
    return gpu if device.parent is None else _instance(gpu, device, known)


def _shared_memory(device: nvml.NvmlDevice) -> nvml.Memory | None:
    """Jetson and other boards whose GPU shares the RAM answer to their name but report no memory of their own."""
    if device.name is None or device.capability is None:
        return None
    ram = host()
    return nvml.Memory(
        total_bytes=ram.ram_bytes, free_bytes=ram.ram_free_bytes, used_bytes=ram.ram_bytes - ram.ram_free_bytes, reserved_bytes=None
    )


def _instance(gpu: Gpu, device: nvml.NvmlDevice, known: Gpu) -> Gpu:
    """A MIG instance: its share of the memory for the bandwidth, of the SMs for the peaks (of the memory, if they are not reported)."""
    memory_share = min(1.0, gpu.memory_bytes / known.memory_bytes)
    share = device.instance_sms / known.sms if device.instance_sms and known.sms else memory_share
    return replace(
        gpu,
        sms=device.instance_sms,
        peak_flops={precision: peak * share for precision, peak in known.peak_flops.items()},
        bandwidth_bytes_per_s=(known.bandwidth_bytes_per_s or 0.0) * memory_share or None,
        nvlink_bytes_per_s=None,
    )


def _pcie_bytes_per_s(device: nvml.NvmlDevice) -> float | None:
    if device.pcie is None:
        return None
    generation, lanes = device.pcie
    per_lane = PCIE_BYTES_PER_S_PER_LANE.get(generation)
    return per_lane * lanes if per_lane else None


def _remarks(gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """What a plan for these cards must say."""
    for gpu in {gpu.name: gpu for gpu in gpus}.values():
        if gpu.vendor != "nvidia":
            yield f"{gpu.name} is planned by memory only: hfopt has no speed figures for {gpu.vendor.capitalize()} devices"
        elif gpu.catalog_name is None:
            rated = "its speed is estimated from cores and clocks" if gpu.peak_flops else "it is planned by memory only"
            yield f"{gpu.name} is not in the catalog: {rated}"
    if len({(gpu.name, gpu.memory_bytes) for gpu in gpus}) > 1:
        smallest = min(gpus, key=lambda gpu: gpu.memory_bytes)
        listed = ", ".join(f"{gpu.name} {format_bytes(gpu.memory_bytes)}" for gpu in gpus)
        yield f"the {len(gpus)} GPUs differ ({listed}): the smallest memory rules, that of {smallest.name}"
