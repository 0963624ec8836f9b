"""The sampling thread: bounded, own cards only, impossible values left out, and no fault leaves it."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from hfopt.monitor import sampler as sampler_module
from hfopt.monitor.fault_guard import Faults
from hfopt.monitor.host_usage import HostReading
from hfopt.monitor.sampler import Sampler
from hfopt.monitor.window import gpu_windows
from hfopt.schema import GpuReading


class Host:
    def read(self) -> HostReading:
        return HostReading(cpu_util=0.5, ram_used_bytes=1, ram_total_bytes=2)


class Cards:
    """Gives one prepared answer after the other, then the last again and again; an exception is raised."""

    def __init__(self, *answers: tuple[GpuReading, ...] | Exception) -> None:
        self.answers, self.calls = list(answers), 0

    def read(self) -> tuple[GpuReading, ...]:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


def reading(power_w: float | None = 100.0, **more: object) -> GpuReading:
    return GpuReading(uuid="GPU-a", sm_util=0.5, total_bytes=100, used_bytes=50, power_w=power_w, power_limit_w=115.0, **more)  # type: ignore[arg-type]


def sampler(cards: Cards | None, said: list[str] | None = None, **options: object) -> Sampler:
    return Sampler(gpus=cards, host=Host(), faults=Faults((said if said is not None else []).append), **options)  # type: ignore[arg-type]


def test_a_week_of_samples_takes_bounded_memory() -> None:
    watching = sampler(Cards((reading(),)), ring=3600)
    for _ in range(3600):
        watching.tick()
    full = _size(watching)
    for _ in range(7 * 24 * 3600 // 20):  # a twentieth of a week in ticks; the ring has been full since the first hour
        watching.tick()
    assert _size(watching) == full
    assert len(watching.since(0.0)) == 3600
    assert full < 16 << 20


def _size(watching: Sampler) -> int:
    samples = watching.since(0.0)
    return sum(sys.getsizeof(sample) + sum(sys.getsizeof(gpu) for gpu in sample.gpus) for sample in samples)


def test_a_reading_that_cannot_be_is_flagged_and_left_out_of_averages_and_energy() -> None:
    watching = sampler(Cards((reading(100.0),), (reading(590.0),), (reading(110.0),)))
    samples = [watching.tick() for _ in range(3)]
    assert samples[1].gpus[0].suspect == ("power_w",)
    (window,) = gpu_windows(samples, watching.energy_j())
    assert window.power_w is not None and (window.power_w.mean, window.power_w.high) == (105.0, 110.0)
    assert window.suspect == 1
    assert window.energy_j is not None and window.energy_j <= 110.0 * (samples[2].time_s - samples[1].time_s) + 1e-9


def test_energy_is_the_cards_own_count_where_it_has_one() -> None:
    watching = sampler(Cards((reading(energy_j=1000.0),), (reading(energy_j=1250.0),)))
    watching.tick()
    watching.tick()
    assert watching.energy_j() == {"GPU-a": 250.0}


def test_readings_that_fail_are_said_once_and_the_host_is_still_read() -> None:
    said: list[str] = []
    watching = sampler(Cards((reading(),), OSError("NVML is gone")), said)
    samples = [watching.tick() for _ in range(5)]
    assert [bool(sample.gpus) for sample in samples] == [True, False, False, False, False]
    assert all(sample.cpu_util == 0.5 for sample in samples)
    assert len(said) == 1 and "NVML is gone" in said[0] and "training continues" in said[0]


def test_a_lost_card_is_told_by_name() -> None:
    said: list[str] = []
    watching = sampler(Cards((reading(),), ()), said)
    for _ in range(4):
        watching.tick()
    assert len(said) == 1 and "GPU-a" in said[0]


def test_the_thread_samples_at_its_interval_and_ends() -> None:
    seen: list[float] = []
    enough = threading.Event()

    def each(sample: object) -> None:
        seen.append(time.monotonic())
        if len(seen) >= 3:
            enough.set()

    watching = sampler(None, interval_s=0.02, each=each)
    watching.start()
    assert enough.wait(60)
    watching.stop()
    count = len(seen)
    assert seen[2] - seen[0] >= 2 * 0.02 * 0.9
    time.sleep(0.1)
    assert len(seen) == count
    assert not [thread for thread in threading.enumerate() if thread.name == "hfopt-sampler"]


def test_since_gives_the_samples_of_a_stretch() -> None:
    watching = sampler(None)
    first = watching.tick()
    middle = time.monotonic()
    second = watching.tick()
    assert watching.since(middle) == [second]
    assert watching.since(first.time_s) == [first, second]
    assert watching.latest is second


@pytest.mark.parametrize("broken", ["host", "each"])
def test_whatever_breaks_in_a_tick_stays_in_it(broken: str) -> None:
    said: list[str] = []
    watching = sampler(None, said, interval_s=0.01, each=(lambda sample: 1 / 0) if broken == "each" else None)
    if broken == "host":
        watching._host = Cards(PermissionError("/proc"))  # type: ignore[assignment]
    watching.start()
    until = time.monotonic() + 60
    while not said and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)  # some more ticks
    thread = watching._thread
    assert thread is not None and thread.is_alive()
    watching.stop()
    assert len(said) == 1


def test_a_driver_that_hangs_holds_up_nobody() -> None:
    """Neither the start nor a reading now nor the end waits for it longer than was allowed, and it is said once."""
    said: list[str] = []
    released = threading.Event()

    class Hangs:
        def read(self) -> tuple[GpuReading, ...]:
            released.wait()
            return ()

    watching = Sampler(gpus=Hangs(), host=Host(), faults=Faults(said.append), patience_s=0.05)
    try:
        watching.start()
        for _ in range(3):
            assert watching.tick().gpus == ()
        assert watching.stop() is False
    finally:
        released.set()
    assert len(said) == 1 and "the driver has not answered for 0.05 s" in said[0]


def test_a_driver_that_hangs_at_the_first_question_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(sampler_module, "open_cards", lambda uuids: released.wait())
    try:
        assert sampler_module.open_cards_in_time(["GPU-a"], patience_s=0.05) == "the driver has not answered for 0.05 s"
    finally:
        released.set()
    monkeypatch.setattr(sampler_module, "open_cards", lambda uuids: "no driver")
    assert sampler_module.open_cards_in_time(["GPU-a"]) == "no driver"
