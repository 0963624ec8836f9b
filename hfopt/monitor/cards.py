"""The cards this process trains on, found by UUID: NVML counts all cards of the machine, CUDA_VISIBLE_DEVICES only some, in any order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfopt.schema import Gpu, GpuReading

if TYPE_CHECKING:
    from hfopt.hardware.nvml import Device, Session

_PCIE_EACH = 5  # readings; NVML watches the link for 20 ms in each direction


class OwnCards:
    """The readings of some cards. A card that stops answering is left out of the tuple."""

    def __init__(self, session: Session, devices: Sequence[Device], pids: Sequence[int]) -> None:
        self._session, self._devices, self._pids = session, tuple(devices), tuple(pids)
        self._count = 0

    def read(self) -> tuple[GpuReading, ...]:
        pcie = self._count % _PCIE_EACH == 0
        self._count += 1
        return tuple(found for device in self._devices if (found := device.reading(self._pids, pcie=pcie)) is not None)

    def facts(self) -> tuple[Gpu, ...]:
        """What the catalog knows about them."""
        from hfopt.hardware import catalog

        found = []
        for device in self._devices:
            memory = device.memory()
            if device.name and memory and (gpu := catalog.identify(device.name, memory.total_bytes)):
                found.append(gpu)
        return tuple(found)

    def close(self) -> None:
        self._session.close()


def open_cards(uuids: Sequence[str] | None, pids: Sequence[int] | None = None) -> OwnCards | str:
    """The cards with these UUIDs (None: all), or why there is nothing to read."""
    from hfopt.hardware import nvml

    session = nvml.connect()
    if isinstance(session, nvml.Unreachable):
        return session.reason
    everything = [found for device in session.devices() for found in (device, *device.instances())]
    wanted = None if uuids is None else {_bare(uuid) for uuid in uuids}
    devices = [device for device in everything if wanted is None or _bare(device.uuid) in wanted]
    if not devices:
        session.close()
        return f"NVML lists no card with UUID {', '.join(uuids or ())}"
    return OwnCards(session, devices, pids if pids is not None else (os.getpid(),))


def torch_uuids(args: Any) -> tuple[str, ...]:
    """UUIDs of the CUDA devices that these TrainingArguments train on; () without CUDA."""
    import torch

    if getattr(args.device, "type", None) != "cuda":
        return ()
    indices = range(args.n_gpu) if args.n_gpu > 1 else [args.device.index if args.device.index is not None else torch.cuda.current_device()]
    return tuple(str(torch.cuda.get_device_properties(index).uuid) for index in indices)


def _bare(uuid: str) -> str:
    """NVML writes 'GPU-6f0a...', torch '6f0a...'."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")
