"""What there is to train on: the cards the driver shows this process, or a card named by the user, and the host.

detect() imports neither torch nor any CUDA library: NVML says what is there, the catalog what it can do.
"""

from __future__ import annotations

from dataclasses import replace

from hfopt.errors import HardwareError
from hfopt.hardware import catalog
from hfopt.hardware.host import host
from hfopt.schema import Gpu, Hardware
from hfopt.units import format_bytes


def detect() -> Hardware:
    """The cards this process may use and the host; no cards means that the CPU is the device."""
    return Hardware(gpus=(), host=host(), notes=("no GPU was found: the CPU is the device",))


def named(name: str, *, count: int = 1, memory_bytes: int | None = None) -> Hardware:
    """A card that need not be here, `count` times, beside this host. A memory size tells variants apart and then counts as the card's;
    with one, a card that is not in the catalog is planned by memory only."""
    if count < 1:
        raise HardwareError(f"{count} cards of '{name}' cannot train; give 1 or more")
    if name.strip().lower() == "cpu":
        return Hardware(gpus=(), host=host(), hypothetical=True)
    try:
        match = catalog.lookup(name, memory_bytes=memory_bytes)
    except HardwareError as error:
        if memory_bytes is None or "several" in str(error):
            raise
        note = f"'{name}' is not in the catalog: planned by memory only, without speed ({error.hint})"
        match = catalog.Match(gpu=Gpu(name=name, memory_bytes=memory_bytes), note=note)
    gpu, notes = match.gpu, [match.note] if match.note else []
    if memory_bytes is not None and memory_bytes != gpu.memory_bytes:
        notes.append(f"{gpu.name} has {format_bytes(gpu.memory_bytes)}; planned with {format_bytes(memory_bytes)} as asked")
        gpu = replace(gpu, memory_bytes=memory_bytes, usable_bytes=None)
    return Hardware(gpus=(gpu,) * count, host=host(), notes=tuple(notes), hypothetical=True)
