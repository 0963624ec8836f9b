"""Readings joined into one window, and windows joined into a longer one.

Closes a window: what the clock, the sampler, the input hook and torch's allocator counted becomes one `Window`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import psutil
import torch

from hfopt.monitor.host_usage import queued_s
from hfopt.monitor.model_inputs import InputWatch
from hfopt.monitor.sampler import Sampler
from hfopt.monitor.step_clock import StepClock
from hfopt.schema import GpuReading, GpuWindow, Phases, Sample, Spread, Window

T = TypeVar("T")
_MOST_UNMERGED = 64


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(mean=sum(known) / len(known), low=min(known), high=max(known)) if known else None


def mean(values: Iterable[float | None]) -> float | None:
    found = spread(values)
    return found.mean if found else None


def most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def data_share(window: Window) -> float:
    """Of the training time, waiting for data; time spent in the queue for a core left out where it is known."""
    if window.free_wait is not None:
        return window.free_wait
    return window.phases.data_wait_s / window.phases.train_s if window.phases.train_s > 0 else 0.0


def gpu_windows(samples: Sequence[Sample], energy_j: Mapping[str, float]) -> tuple[GpuWindow, ...]:
    """One per card, in the order first seen."""
    by_card: dict[str, list[GpuReading]] = {}
    for sample in samples:
        for reading in sample.gpus:
            by_card.setdefault(reading.uuid, []).append(reading)
    return tuple(_gpu_window(uuid, readings, energy_j.get(uuid)) for uuid, readings in by_card.items())


def _gpu_window(uuid: str, readings: Sequence[GpuReading], energy_j: float | None) -> GpuWindow:
    def good(name: str) -> list[float | None]:
        return [getattr(reading, name) for reading in readings if name not in reading.suspect]

    def peak(name: str) -> int | None:
        return most(int(value) if value is not None else None for value in good(name))

    reasons = {reason for reading in readings for reason in reading.throttle}
    return GpuWindow(
        uuid=uuid,
        sm_util=spread(good("sm_util")),
        memory_util=spread(good("memory_util")),
        used_bytes=peak("used_bytes"),
        own_used_bytes=peak("own_used_bytes"),
        total_bytes=readings[-1].total_bytes,
        power_w=spread(good("power_w")),
        power_limit_w=readings[-1].power_limit_w,
        temperature_c=spread(good("temperature_c")),
        sm_clock_mhz=mean(good("sm_clock_mhz")),
        max_sm_clock_mhz=readings[-1].max_sm_clock_mhz,
        throttle={reason: sum(reason in reading.throttle for reading in readings) / len(readings) for reason in sorted(reasons)},
        pcie_rx_bytes_per_s=mean(good("pcie_rx_bytes_per_s")),
        pcie_tx_bytes_per_s=mean(good("pcie_tx_bytes_per_s")),
        energy_j=energy_j,
        readings=len(readings),
        suspect=sum(len(reading.suspect) for reading in readings),
    )


def merge(windows: Sequence[Window]) -> Window:
    """One window over all: times and counts add up, shares are weighted by the time they hold for."""
    assert windows
    if len(windows) == 1:
        return windows[0]

    def weighted(get: Callable[[Window], float | None]) -> float | None:
        return _weighted([(get(window), window.seconds) for window in windows])

    cards = {gpu.uuid: None for window in windows for gpu in window.gpus}
    fixed = [window.fixed_length for window in windows if window.fixed_length is not None]
    return Window(
        first_step=windows[0].first_step,
        last_step=windows[-1].last_step,
        steps=sum(window.steps for window in windows),
        seconds=sum(window.seconds for window in windows),
        stopped_s=sum(window.stopped_s for window in windows),
        phases=Phases(**{f.name: sum(getattr(window.phases, f.name) for window in windows) for f in fields(Phases)}),
        synced=all(window.synced for window in windows),
        evals=sum(window.evals for window in windows),
        saves=sum(window.saves for window in windows),
        logs=sum(window.logs for window in windows),
        samples=_sum(window.samples for window in windows),
        tokens=_sum(window.tokens for window in windows),
        padding_share=weighted(lambda window: window.padding_share),
        fixed_length=all(fixed) if fixed else None,
        mfu=_weighted([(window.mfu, window.phases.train_s) for window in windows]),
        gpus=tuple(_merge_card(uuid, [gpu for window in windows for gpu in window.gpus if gpu.uuid == uuid]) for uuid in cards),
        cpu_util=_spreads([(window.cpu_util, window.seconds) for window in windows]),
        main_thread_util=weighted(lambda window: window.main_thread_util),
        process_cores=weighted(lambda window: window.process_cores),
        preempted=weighted(lambda window: window.preempted),
        core_wait=weighted(lambda window: window.core_wait),
        free_wait=weighted(data_share) if any(window.free_wait is not None for window in windows) else None,
        worker_util=weighted(lambda window: window.worker_util),
        worker_count=most(window.worker_count for window in windows),
        ram_used_bytes=most(window.ram_used_bytes for window in windows),
        ram_total_bytes=windows[-1].ram_total_bytes,
        disk_read_bytes_per_s=weighted(lambda window: window.disk_read_bytes_per_s),
        allocated_peak_bytes=most(window.allocated_peak_bytes for window in windows),
        reserved_peak_bytes=most(window.reserved_peak_bytes for window in windows),
        alloc_retries=_sum(window.alloc_retries for window in windows),
        energy_j=_sum(window.energy_j for window in windows),
    )


class Total:
    """All windows given to it as one; merged many at a time, since nobody asks after each."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    def add(self, window: Window) -> None:
        self._windows.append(window)
        if len(self._windows) >= _MOST_UNMERGED:
            self._windows = [merge(self._windows)]

    def window(self) -> Window | None:
        """None if there was none."""
        return merge(self._windows) if self._windows else None


def _merge_card(uuid: str, cards: Sequence[GpuWindow]) -> GpuWindow:
    weights = [max(card.readings, 1) for card in cards]
    reasons = {reason for card in cards for reason in card.throttle}

    def weighted(get: Callable[[GpuWindow], float | None]) -> float | None:
        return _weighted([(get(card), weight) for card, weight in zip(cards, weights, strict=True)])

    def joined(get: Callable[[GpuWindow], Spread | None]) -> Spread | None:
        return _spreads([(get(card), weight) for card, weight in zip(cards, weights, strict=True)])

    return GpuWindow(
        uuid=uuid,
        sm_util=joined(lambda card: card.sm_util),
        memory_util=joined(lambda card: card.memory_util),
        used_bytes=most(card.used_bytes for card in cards),
        own_used_bytes=most(card.own_used_bytes for card in cards),
        total_bytes=cards[-1].total_bytes,
        power_w=joined(lambda card: card.power_w),
        power_limit_w=cards[-1].power_limit_w,
        temperature_c=joined(lambda card: card.temperature_c),
        sm_clock_mhz=weighted(lambda card: card.sm_clock_mhz),
        max_sm_clock_mhz=cards[-1].max_sm_clock_mhz,
        throttle={reason: weighted(lambda card, reason=reason: card.throttle.get(reason, 0.0)) or 0.0 for reason in sorted(reasons)},  # type: ignore[misc]
        pcie_rx_bytes_per_s=weighted(lambda card: card.pcie_rx_bytes_per_s),
        pcie_tx_bytes_per_s=weighted(lambda card: card.pcie_tx_bytes_per_s),
        energy_j=_sum(card.energy_j for card in cards),
        readings=sum(card.readings for card in cards),
        suspect=sum(card.suspect for card in cards),
    )


def _weighted(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total > 0 else mean(value for value, _ in known)


def _spreads(pairs: Sequence[tuple[Spread | None, float]]) -> Spread | None:
    known = [(one, weight) for one, weight in pairs if one is not None]
    average = _weighted([(one.mean, weight) for one, weight in known])
    if average is None:
        return None
    return Spread(mean=average, low=min(one.low for one, _ in known), high=max(one.high for one, _ in known))


def _sum(values: Iterable[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None  # type: ignore[arg-type, return-value]


_CONTENDED = 0.8  # of the times the training thread leaves its core it is put off it: others use the machine
_PROBE = 256  # rows and columns of the matrices that time the CPU: small enough for a few milliseconds, large enough to be compute-bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """What turns counts into rates. None where it is not known."""

    samples_per_micro_batch: int  # of one rank
    world_size: int
    flops_per_token: float | None
    flops_per_sample: float | None
    peak_flops: float | None  # of all devices of this rank
    synced: bool
    devices: tuple[int, ...] = ()  # CUDA indices this rank trains on


@dataclass(frozen=True, slots=True)
class _CpuTimes:
    """CPU seconds of the calling (training) thread and of its process so far, and how often the thread left its core."""

    thread_s: float
    process_s: float
    wall_s: float
    given_up: int = 0  # by waiting for something
    put_off: int = 0  # because others want it
    queued_s: float | None = None  # wanting to run, while others had the core

    @classmethod
    def now(cls) -> _CpuTimes:
        left = _switches()
        return cls(time.thread_time(), time.process_time(), time.monotonic(), *left, queued_s())

    def core_wait_since(self, before: _CpuTimes) -> float | None:
        if self.queued_s is None or before.queued_s is None:
            return None
        return min(1.0, max(0.0, self.queued_s - before.queued_s) / max(self.wall_s - before.wall_s, 1e-9))

    def preempted_since(self, before: _CpuTimes) -> float | None:
        given_up, put_off = self.given_up - before.given_up, self.put_off - before.put_off
        return put_off / (given_up + put_off) if given_up + put_off else None


class Meter:
    def __init__(self, clock: StepClock, sampler: Sampler, inputs: InputWatch, scale: Scale) -> None:
        self._clock, self._sampler, self._inputs, self._scale = clock, sampler, inputs, scale
        self._energy_j: dict[str, float] = {}
        self._retries: int | None = None
        self._tokens_seen: int | None = None
        self._step = 0
        self._cpu_s = _CpuTimes.now()

    def begin(self, state: Any) -> None:
        """At the end of the first step: what was counted before it is warm-up."""
        self._inputs.take()
        self._tokens_seen, self._step = state.num_input_tokens_seen, state.global_step
        self._energy_j, self._retries = self._sampler.energy_j(), _Allocator.read(self._scale.devices).retries
        self._cpu_s = _CpuTimes.now()

    def close(self, state: Any) -> Window | None:
        """The window since the last one; None if no step ended in it."""
        if not self._clock.tally.steps:
            return None
        tally = self._clock.take()
        if (latest := self._sampler.latest) is None or latest.cpu_util is None:
            self._sampler.tick()  # the run is younger than the interval
        samples = self._sampler.since(tally.began_s)
        if not samples and (latest := self._sampler.latest) is not None:
            samples = [latest]  # a window shorter than the interval
        rows, tokens, padding, fixed = self._inputs.take()
        energy = self._sampler.energy_j()
        used_j = {uuid: total - self._energy_j.get(uuid, 0.0) for uuid, total in energy.items()}
        memory, cpu_s = _Allocator.read(self._scale.devices), _CpuTimes.now()
        passed_s = max(cpu_s.wall_s - self._cpu_s.wall_s - tally.stopped_s, 1e-9)
        seen = state.num_input_tokens_seen - (self._tokens_seen or 0)
        own_samples = self._own_samples(rows, tally.micro_batches)
        preempted = cpu_s.preempted_since(self._cpu_s)
        contended = not self._scale.devices and preempted is not None and preempted >= _CONTENDED
        self._clock.counts_cpu = contended
        window = Window(
            first_step=self._step + 1,
            last_step=state.global_step,
            steps=tally.steps,
            seconds=tally.total_s,
            stopped_s=tally.stopped_s,
            phases=tally.phases(),
            synced=self._scale.synced,
            evals=tally.evals,
            saves=tally.saves,
            logs=tally.logs,
            samples=own_samples * self._scale.world_size,
            tokens=float(seen) if seen > 0 else float(tokens * self._scale.world_size) if tokens else None,
            padding_share=padding,
            fixed_length=fixed,
            mfu=self._mfu(tokens, own_samples, tally.phases().train_s),
            gpus=gpu_windows(samples, used_j),
            main_thread_util=min(1.0, (cpu_s.thread_s - self._cpu_s.thread_s) / passed_s),
            process_cores=(cpu_s.process_s - self._cpu_s.process_s) / passed_s,
            preempted=preempted,
            core_wait=cpu_s.core_wait_since(self._cpu_s),
            free_wait=tally.free_wait() if contended else None,
            **_host_figures(samples),
            allocated_peak_bytes=memory.allocated_peak_bytes,
            reserved_peak_bytes=memory.reserved_peak_bytes,
            alloc_retries=memory.retries - self._retries if memory.retries is not None and self._retries is not None else None,
            energy_j=sum(used_j.values()) if used_j else None,
        )
        self._energy_j, self._retries, self._tokens_seen, self._step = (
            energy,
            memory.retries,
            state.num_input_tokens_seen,
            state.global_step,
        )
        self._cpu_s = cpu_s
        return window

    def _own_samples(self, rows: int, micro_batches: int) -> float:
        """Rows that went through the model; where rows are not samples (packed, or several passes per batch), as the arguments say."""
        full = micro_batches * self._scale.samples_per_micro_batch
        return float(rows if micro_batches < rows <= full else full)

    def _mfu(self, tokens: int | None, samples: float, train_s: float) -> float | None:
        scale = self._scale
        if not scale.peak_flops or train_s <= 0:
            return None
        per_sample = scale.flops_per_sample if scale.flops_per_sample is not None else self._inputs.flops_per_sample
        if per_sample is not None:
            return samples * per_sample / train_s / scale.peak_flops
        if tokens and scale.flops_per_token is not None:
            return tokens * scale.flops_per_token / train_s / scale.peak_flops
        return None


def _switches() -> tuple[int, int]:
    """Context switches of the calling thread, voluntary and not; (0, 0) where the system does not count them by thread."""
    try:
        import resource

        used = resource.getrusage(resource.RUSAGE_THREAD)
    except (ImportError, AttributeError):
        return 0, 0
    return used.ru_nvcsw, used.ru_nivcsw


def cpu_peak_flops(dtype: Any = torch.float32) -> float:
    """Of this CPU with torch's threads as they are set: the best of five products of 256 × 256 matrices, a few milliseconds in all.

    Where others use the machine the threads of a product wait for each other, up to hundreds of times as long; but it is never less than
    what one core does by its clock.
    """
    left, right = torch.ones(_PROBE, _PROBE, dtype=dtype), torch.ones(_PROBE, _PROBE, dtype=dtype)
    best_s = float("inf")
    with torch.no_grad():
        for _ in range(6):
            began_s = time.perf_counter()
            torch.mm(left, right)
            best_s = min(best_s, time.perf_counter() - began_s)
    return max(2.0 * _PROBE**3 / best_s, _one_core_flops() if dtype == torch.float32 else 0.0)


def _one_core_flops() -> float:
    """Float32, by clock and vector units; 0 where they are not known. Two units of eight multiply-adds a cycle with AVX2 (Intel from
    Haswell, AMD from Zen 2 on); some of those with AVX-512 do twice as much."""
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    if frequency is None or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return 0.0
    return 32e6 * float(frequency.current)


def _host_figures(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "cpu_util": spread(sample.cpu_util for sample in samples),
        "worker_util": mean(sample.worker_util for sample in samples),
        "worker_count": most(sample.worker_count for sample in samples),
        "ram_used_bytes": most(sample.ram_used_bytes for sample in samples),
        "ram_total_bytes": samples[-1].ram_total_bytes if samples else None,
        "disk_read_bytes_per_s": mean(sample.disk_read_bytes_per_s for sample in samples),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _Allocator:
    """torch's own counts; peaks are those of the fullest card and since the process began, for resetting them would disturb others."""

    allocated_peak_bytes: int | None = None
    reserved_peak_bytes: int | None = None
    retries: int | None = None

    @classmethod
    def read(cls, devices: tuple[int, ...]) -> _Allocator:
        if not devices or not torch.cuda.is_initialized():
            return cls()
        stats = [torch.cuda.memory_stats(index) for index in devices]
        return cls(
            allocated_peak_bytes=max(int(of_card.get("allocated_bytes.all.peak", 0)) for of_card in stats),
            reserved_peak_bytes=max(int(of_card.get("reserved_bytes.all.peak", 0)) for of_card in stats),
            retries=sum(int(of_card.get("num_alloc_retries", 0)) for of_card in stats),
        )
