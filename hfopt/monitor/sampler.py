"""A thread that reads the cards and the host every second into a bounded ring.

A reading that cannot be (590 W on a 115 W board) is named, so that no average takes it in. The cards this process trains on, found by UUID:
NVML counts all cards of the machine, CUDA_VISIBLE_DEVICES only some, in any order. It shares the interpreter with training, so a tick must
stay well under a millisecond of Python; a tick that took long makes the next one wait longer, so that sampling never takes more than half a
percent of the time. Energy is summed as it is read, because the ring forgets.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hfopt.monitor.fault_guard import Faults, switched_off_on_error
from hfopt.monitor.host_usage import HostReading, switches
from hfopt.monitor.step_clock import LONG_S
from hfopt.schema import Gpu, GpuReading, Sample

if TYPE_CHECKING:
    from hfopt.hardware.nvml import NvmlDevice, NvmlSession


_MOST_POWER_W = 3000.0  # above any single board sold
_MOST_OVER_LIMIT = 1.5  # averaged draw overshoots the limit by a few percent, never by half
_MOST_CLOCK_MHZ = 5000.0
_COLDEST_C, _HOTTEST_C = -10.0, 130.0  # boards switch off well before
_MOST_PCIE_BYTES_PER_S = 256e9  # PCIe 7.0 ×16


def flagged(reading: GpuReading) -> GpuReading:
    """The reading with the names of its impossible values in `suspect`."""
    bad = set(reading.suspect) | {name for name, wrong in _checks(reading).items() if wrong}
    return replace(reading, suspect=tuple(sorted(bad))) if bad else reading


def _checks(reading: GpuReading) -> dict[str, bool]:
    limit_w = reading.power_limit_w * _MOST_OVER_LIMIT if reading.power_limit_w else _MOST_POWER_W
    top_clock = reading.max_sm_clock_mhz * 1.2 if reading.max_sm_clock_mhz else _MOST_CLOCK_MHZ
    return {
        "sm_util": _outside(reading.sm_util, 0.0, 1.0),
        "memory_util": _outside(reading.memory_util, 0.0, 1.0),
        "used_bytes": _outside(reading.used_bytes, 0, reading.total_bytes),
        "own_used_bytes": _outside(reading.own_used_bytes, 0, reading.total_bytes),
        "power_w": _outside(reading.power_w, 0.0, limit_w),
        "temperature_c": _outside(reading.temperature_c, _COLDEST_C, _HOTTEST_C),
        "sm_clock_mhz": _outside(reading.sm_clock_mhz, 0.0, top_clock),
        "pcie_rx_bytes_per_s": _outside(reading.pcie_rx_bytes_per_s, 0.0, _MOST_PCIE_BYTES_PER_S),
        "pcie_tx_bytes_per_s": _outside(reading.pcie_tx_bytes_per_s, 0.0, _MOST_PCIE_BYTES_PER_S),
    }


def _outside(value: float | None, low: float, high: float | None) -> bool:
    return value is not None and (value < low or (high is not None and value > high) or value != value)


PATIENCE_S = 20.0  # with a driver that does not answer, before the cards are left alone
_PCIE_EACH = 5  # readings; NVML watches the link for 20 ms in each direction


class OwnCards:
    """The readings of some cards. A card that stops answering is left out of the tuple."""

    def __init__(self, session: NvmlSession, devices: Sequence[NvmlDevice], pids: Sequence[int]) -> None:
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


def open_cards_in_time(uuids: Sequence[str], patience_s: float = PATIENCE_S) -> OwnCards | str:
    """The same for who must not wait for ever: a driver may hang at the first question."""
    answer: list[OwnCards | str] = []
    thread = threading.Thread(target=lambda: answer.append(open_cards(uuids)), name="hfopt-driver", daemon=True)
    thread.start()
    thread.join(patience_s)
    return answer[0] if answer else f"the driver has not answered for {patience_s:g} s"


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


RING = 3600  # an hour at the default interval, about 3 MB for one card
_MOST_OF_TIME = 0.005
_STOPS = 64  # that are remembered
_WAKES_PER_S = 20.0  # of a thread that waits for the interpreter's lock, a tenth of what Python's switch interval of 5 ms makes


class GpuSource(Protocol):
    def read(self) -> tuple[GpuReading, ...]: ...


class HostSource(Protocol):
    def read(self) -> HostReading: ...


class LostCard(Exception):  # noqa: N818 - a state of the machine, reported to the user as such
    """A card that answered before does not any more."""


class Sampler:
    """`start()`, then `latest` and `since(time_s)` from any thread, then `stop()`. Times are time.monotonic().

    `each` is called with every sample; the thread ends by itself once `over` says that nobody is left to sample for.
    """

    def __init__(
        self,
        *,
        gpus: GpuSource | None,
        host: HostSource,
        faults: Faults,
        interval_s: float = 1.0,
        ring: int = RING,
        each: Callable[[Sample], None] | None = None,
        over: Callable[[], bool] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.faults = faults
        self.interval_s = interval_s
        self._gpus, self._host, self._each, self._over = gpus, host, each, over
        self._samples: deque[Sample] = deque(maxlen=ring)
        self._seen: frozenset[str] = frozenset()
        self._energy_j: dict[str, float] = {}
        self._stop, self._first = threading.Event(), threading.Event()
        self._patience_s, self._stuck = patience_s, False
        self._thread: threading.Thread | None = None
        self._due: tuple[float, int | None] | None = None  # when the thread is to wake, and its count of switches before it slept
        self._stops: deque[tuple[float, float]] = deque(maxlen=_STOPS)
        self._lock = threading.Lock()  # ticks come from the thread and from those who need one now

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def since(self, time_s: float) -> list[Sample]:
        found: list[Sample] = []
        for sample in reversed(self._samples.copy()):
            if sample.time_s < time_s:
                break
            found.append(sample)
        return found[::-1]

    def energy_j(self) -> dict[str, float]:
        """By card, since the start."""
        return dict(self._energy_j)

    def start(self) -> None:
        """Returns once there is a first sample, or once the driver was waited for long enough: training does not hang with it."""
        self._thread = threading.Thread(target=self._run, name="hfopt-sampler", daemon=True)
        self._thread.start()
        if not self._first.wait(self._patience_s):
            self._give_up_on_driver()

    def stop(self) -> bool:
        """Whether the thread has ended; one that hangs in the driver is left behind."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout=2.0)
        return not thread.is_alive()

    def tick(self) -> Sample:
        """A sample now; where another thread hangs in the driver, what was last known."""
        if not self._lock.acquire(timeout=0 if self._stuck else self._patience_s):
            self._give_up_on_driver()
            return self.latest or Sample(
                time_s=time.monotonic(), gpus=(), cpu_util=None, main_thread_util=None, ram_used_bytes=None, ram_total_bytes=None
            )
        try:
            return self._tick()
        finally:
            self._lock.release()

    def _give_up_on_driver(self) -> None:
        self._stuck = True
        self.faults.report("GPU readings", TimeoutError(f"the driver has not answered for {self._patience_s:g} s"))

    def _tick(self) -> Sample:
        gpus = self._read_gpus() or ()
        host = self._read_host() or HostReading()
        sample = Sample(
            time_s=time.monotonic(),
            gpus=gpus,
            cpu_util=host.cpu_util,
            main_thread_util=host.main_thread_util,
            ram_used_bytes=host.ram_used_bytes,
            ram_total_bytes=host.ram_total_bytes,
            disk_read_bytes_per_s=host.disk_read_bytes_per_s,
            worker_util=host.worker_util,
            worker_count=host.worker_count,
            core_wait=host.core_wait,
        )
        self._add_energy(sample)
        self._samples.append(sample)
        return sample

    def _run(self) -> None:
        self._tell(self.tick())
        self._first.set()
        wait_s = self.interval_s
        while not self._slept(wait_s) and not self._is_over():
            began_s = time.thread_time()
            sample = self.tick()
            self._tell(sample)
            wait_s = max(self.interval_s, (time.thread_time() - began_s) / _MOST_OF_TIME)

    def _slept(self, wait_s: float) -> bool:
        """Whether it was woken to end."""
        self._due = (time.monotonic() + wait_s, switches())
        ended = self._stop.wait(wait_s)
        if (stop := self._stop_now()) is not None:
            self._stops.append(stop)
        self._due = None
        return ended

    def _stop_now(self) -> tuple[float, float] | None:
        """From when this thread should have been awake until now, if the whole process stood still: one that only waits for the interpreter
        (another thread holds its lock) wakes two hundred times a second to ask for it."""
        thread, due, now_s = self._thread, self._due, time.monotonic()
        if due is None or thread is None or now_s - due[0] < LONG_S:
            return None
        woken = switches(thread.native_id)
        if woken is None or due[1] is None or woken - due[1] > _WAKES_PER_S * (now_s - due[0]):
            return None
        return due[0], now_s

    def stopped_s(self, began_s: float, ended_s: float) -> float:
        """Of a stretch, how long the process was stopped (SIGSTOP, a frozen container), as far as this thread can tell."""
        now = self._stop_now()
        stops = list(self._stops)
        if now is not None and (not stops or stops[-1][0] != now[0]):  # else the thread has just noted it
            stops.append(now)
        return sum(max(0.0, min(end, ended_s) - max(begin, began_s)) for begin, end in stops)

    @switched_off_on_error("the look whether training goes on")
    def _is_over(self) -> bool:
        return self._over is not None and self._over()

    @switched_off_on_error("live view")
    def _tell(self, sample: Sample) -> None:
        if self._each is not None:
            self._each(sample)

    @switched_off_on_error("GPU readings")
    def _read_gpus(self) -> tuple[GpuReading, ...]:
        if self._gpus is None:
            return ()
        readings = tuple(flagged(reading) for reading in self._gpus.read())
        present = frozenset(reading.uuid for reading in readings if reading.total_bytes is not None or reading.sm_util is not None)
        if lost := self._seen - present:
            raise LostCard(f"{', '.join(sorted(lost))} does not answer any more")
        self._seen = present
        return readings

    @switched_off_on_error("CPU and RAM readings")
    def _read_host(self) -> HostReading:
        return self._host.read()

    def _add_energy(self, sample: Sample) -> None:
        before = self.latest
        if before is None:
            return
        counted = {reading.uuid: reading.energy_j for reading in before.gpus}
        for reading in sample.gpus:
            start_j, used_j = counted.get(reading.uuid), None
            if reading.energy_j is not None and start_j is not None and reading.energy_j >= start_j:
                used_j = reading.energy_j - start_j  # the card's own counter
            elif reading.power_w is not None and "power_w" not in reading.suspect:
                used_j = reading.power_w * min(sample.time_s - before.time_s, 10 * self.interval_s)
            if used_j is not None:
                self._energy_j[reading.uuid] = self._energy_j.get(reading.uuid, 0.0) + used_j
