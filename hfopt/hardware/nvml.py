"""The driver's word, through NVML: the only importer of pynvml, and a border no NVMLError crosses.

What the driver or the card does not say is None. `connect()` answers with a session or with the reason why there is none; a device that
has fallen off the bus answers None from then on. Nothing is loaded before the first connect().
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hfopt.schema import GpuReading
from hfopt.units import MIB

_MEMORY_INFO_V2 = 0x02000028  # sizeof(nvmlMemory_v2_t) | 2 << 24, nvml.h
_MAX_NVLINKS = 18  # NVML_NVLINK_MAX_LINKS, nvml.h
_THROTTLE_BITS = {  # nvmlClocksEventReason*, nvml.h; idle, application clocks and display clocks hold nothing back
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreachable:
    """Why NVML does not answer."""

    kind: Literal["no_binding", "no_library", "no_driver", "mismatch", "other"]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """As the driver counts it. `free` is what nobody holds: other processes and the driver's own reserve are off it."""

    total_bytes: int
    free_bytes: int
    used_bytes: int  # by processes, without the driver's reserve where it is told apart
    reserved_bytes: int | None


def connect() -> NvmlSession | Unreachable:
    """A session with the driver, or why there is none."""
    try:
        import pynvml
    except ImportError as error:
        return Unreachable(kind="no_binding", reason=f"the Python package nvidia-ml-py cannot be imported: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        kinds: dict[int, Literal["no_library", "no_driver", "mismatch"]] = {
            pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no_library",
            pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "no_driver",
            pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "mismatch",
        }
        return Unreachable(kind=kinds.get(error.value, "other"), reason=str(error))
    return NvmlSession(pynvml)


class NvmlSession:
    """NVML, initialised. Close it when done; a closed session's devices answer None."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._open = True

    def close(self) -> None:
        """NVML counts its users: closing twice would close it for another one."""
        if self._open:
            self.ask("nvmlShutdown")
            self._open = False

    def ask(self, function: str, *arguments: Any) -> Any:
        """The answer of an NVML call, or None where binding, driver or device do not give one."""
        return self.ask_or_lost(function, *arguments)[0]

    def ask_or_lost(self, function: str, *arguments: Any) -> tuple[Any, bool]:
        """The answer, and whether the device is gone."""
        call = getattr(self._library, function, None)
        if call is None or not self._open:
            return None, not self._open
        try:
            return call(*arguments), False
        except self._library.NVMLError as error:
            gone = (self._library.NVML_ERROR_GPU_IS_LOST, self._library.NVML_ERROR_UNINITIALIZED, self._library.NVML_ERROR_RESET_REQUIRED)
            return None, error.value in gone

    @property
    def driver_version(self) -> str | None:
        return _text(self.ask("nvmlSystemGetDriverVersion"))

    @property
    def cuda_version(self) -> str | None:
        """The newest CUDA the driver runs, as '12.8'."""
        number = self.ask("nvmlSystemGetCudaDriverVersion_v2") or self.ask("nvmlSystemGetCudaDriverVersion")
        return f"{number // 1000}.{number % 1000 // 10}" if number else None

    @property
    def count(self) -> int:
        """The cards the driver counts, the lost ones among them."""
        return self.ask("nvmlDeviceGetCount") or 0

    def devices(self) -> tuple[NvmlDevice, ...]:
        """Every card in the driver's order (by PCI bus); a card that cannot be opened is left out."""
        return tuple(self._devices())

    def _devices(self) -> Iterator[NvmlDevice]:
        for index in range(self.count):
            handle = self.ask("nvmlDeviceGetHandleByIndex", index)
            uuid = _text(self.ask("nvmlDeviceGetUUID", handle)) if handle is not None else None
            if uuid is not None:
                yield NvmlDevice(self, handle, index=index, uuid=uuid)


class NvmlDevice:
    """One card, or one MIG instance of it. Facts are asked for once, readings each time."""

    def __init__(self, session: NvmlSession, handle: Any, *, index: int, uuid: str, parent: NvmlDevice | None = None) -> None:
        self._session, self._handle = session, handle
        self.index, self.uuid, self.parent = index, uuid, parent

    def ask(self, function: str, *arguments: Any) -> Any:
        return self._session.ask(function, self._handle, *arguments)

    @cached_property
    def name(self) -> str | None:
        return _text(self.ask("nvmlDeviceGetName"))

    @cached_property
    def capability(self) -> tuple[int, int] | None:
        answer = (self.parent or self).ask("nvmlDeviceGetCudaComputeCapability")
        return (answer[0], answer[1]) if answer else None

    @cached_property
    def cores(self) -> int | None:
        return self.ask("nvmlDeviceGetNumGpuCores") or None

    @cached_property
    def instance_sms(self) -> int | None:
        """The SMs of a MIG instance; the whole card's are cores / cores per SM."""
        attributes = self.ask("nvmlDeviceGetAttributes_v2") if self.parent else None
        return attributes.multiprocessorCount if attributes else None

    @cached_property
    def legacy_mig_uuid(self) -> str | None:
        """The name of a MIG instance before driver 470, which CUDA_VISIBLE_DEVICES still takes."""
        if self.parent is None:
            return None
        ids = (self.ask("nvmlDeviceGetGpuInstanceId"), self.ask("nvmlDeviceGetComputeInstanceId"))
        return None if None in ids else f"MIG-{self.parent.uuid}/{ids[0]}/{ids[1]}"

    @cached_property
    def max_sm_clock_mhz(self) -> float | None:
        return _number((self.parent or self).ask("nvmlDeviceGetMaxClockInfo", 1))  # NVML_CLOCK_SM

    @cached_property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Bus width × memory clock × 2: NVML's memory clock is half the data rate for GDDR and HBM alike."""
        bits, mhz = self.ask("nvmlDeviceGetMemoryBusWidth"), self.ask("nvmlDeviceGetMaxClockInfo", 2)  # NVML_CLOCK_MEM
        return bits / 8 * mhz * 1e6 * 2 if bits and mhz else None

    @property
    def power_limit_w(self) -> float | None:
        return _number(self.ask("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    @cached_property
    def pcie(self) -> tuple[int, int] | None:
        """Generation and lanes of the link. The generation falls while idle, so the highest one counts; the lanes are the slot's."""
        generation = self.ask("nvmlDeviceGetMaxPcieLinkGeneration")
        lanes = self.ask("nvmlDeviceGetCurrPcieLinkWidth") or self.ask("nvmlDeviceGetMaxPcieLinkWidth")
        return (generation, lanes) if generation and lanes else None

    @cached_property
    def max_pcie_lanes(self) -> int | None:
        return self.ask("nvmlDeviceGetMaxPcieLinkWidth") or None

    @cached_property
    def active_nvlinks(self) -> int:
        return sum(self.ask("nvmlDeviceGetNvLinkState", link) == 1 for link in range(_MAX_NVLINKS))

    @cached_property
    def mig_enabled(self) -> bool:
        mode = self.ask("nvmlDeviceGetMigMode")
        return bool(mode and mode[0] == 1)

    def instances(self) -> tuple[NvmlDevice, ...]:
        """The MIG instances of this card."""
        if not self.mig_enabled:
            return ()
        found = []
        for number in range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", number)
            uuid = _text(self._session.ask("nvmlDeviceGetUUID", handle)) if handle is not None else None
            if uuid is not None:
                found.append(NvmlDevice(self._session, handle, index=self.index, uuid=uuid, parent=self))
        return tuple(found)

    def memory(self) -> Memory | None:
        """Version 2 tells the driver's reserve apart; version 1, for older drivers, counts it as used. Jetson boards give neither."""
        if answer := self.ask("nvmlDeviceGetMemoryInfo", _MEMORY_INFO_V2):
            return Memory(total_bytes=answer.total, free_bytes=answer.free, used_bytes=answer.used, reserved_bytes=answer.reserved)
        if answer := self.ask("nvmlDeviceGetMemoryInfo"):
            return Memory(total_bytes=answer.total, free_bytes=answer.free, used_bytes=answer.used, reserved_bytes=None)
        attributes = self.ask("nvmlDeviceGetAttributes_v2") if self.parent else None
        if attributes:
            size = attributes.memorySizeMB * MIB
            return Memory(total_bytes=size, free_bytes=size, used_bytes=0, reserved_bytes=None)
        return None

    def used_by(self, pids: Collection[int]) -> int | None:
        """Bytes these processes hold on the card. None where the driver does not say, or where it counts processes of another namespace."""
        processes = self.ask("nvmlDeviceGetComputeRunningProcesses_v3")
        if processes is None:
            processes = self.ask("nvmlDeviceGetComputeRunningProcesses_v2")
        if processes is None:
            return None
        ours = [process.usedGpuMemory for process in processes if process.pid in pids]
        if not ours and any(not Path(f"/proc/{process.pid}").exists() for process in processes):
            return None
        return None if None in ours else sum(ours)

    def reading(self, own_pids: Collection[int] = (), *, pcie: bool = False) -> GpuReading | None:
        """What the card does now; None if it no longer answers. NVML measures PCIe traffic over 20 ms for each direction: only on demand.

        A MIG instance shows its own memory; heat and clocks are the whole card's; utilization and power are not reported per instance.
        """
        if self._session.ask_or_lost("nvmlDeviceGetUUID", self._handle)[1]:
            return None
        chip, memory = self.parent or self, self.memory()
        utilization = self.ask("nvmlDeviceGetUtilizationRates")
        reasons = chip.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = chip.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return GpuReading(
            uuid=self.uuid,
            sm_util=_number(utilization.gpu, 1e-2) if utilization else None,
            memory_util=_number(utilization.memory, 1e-2) if utilization else None,
            used_bytes=memory.used_bytes if memory else None,
            total_bytes=memory.total_bytes if memory else None,
            own_used_bytes=self.used_by(own_pids) if own_pids else None,
            power_w=_number(self.ask("nvmlDeviceGetPowerUsage"), 1e-3),
            power_limit_w=self.power_limit_w,
            energy_j=_number(self.ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            temperature_c=_number(chip.ask("nvmlDeviceGetTemperature", 0)),  # NVML_TEMPERATURE_GPU
            sm_clock_mhz=_number(chip.ask("nvmlDeviceGetClockInfo", 1)),
            max_sm_clock_mhz=self.max_sm_clock_mhz,
            throttle=tuple(name for bit, name in _THROTTLE_BITS.items() if (reasons or 0) & bit),
            pcie_tx_bytes_per_s=_number(self.ask("nvmlDeviceGetPcieThroughput", 0), 1e3) if pcie else None,
            pcie_rx_bytes_per_s=_number(self.ask("nvmlDeviceGetPcieThroughput", 1), 1e3) if pcie else None,
        )


def _text(answer: str | bytes | None) -> str | None:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _number(answer: int | None, factor: float = 1.0) -> float | None:
    return None if answer is None else answer * factor
