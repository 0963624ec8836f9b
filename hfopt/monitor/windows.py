"""Many samples become one window, and many windows one: means over the readings that can be, peaks over all, sums where things add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

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
