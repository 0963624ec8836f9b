"""A process watched from outside: its CPU and RAM by psutil, the cards it holds memory on by NVML; its steps are not known."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import psutil

from hfopt.errors import LogError
from hfopt.monitor.cards import OwnCards, open_cards
from hfopt.monitor.harmless import Faults, to_stderr
from hfopt.monitor.host import HostProbe
from hfopt.monitor.journal import point
from hfopt.monitor.sampler import Sampler
from hfopt.monitor.status import status_line
from hfopt.schema import GpuReading


class CardsOf:
    """Of all cards those on which the processes hold memory; every card if the driver does not tell who holds what."""

    def __init__(self, cards: OwnCards) -> None:
        self._cards = cards

    def read(self) -> tuple[GpuReading, ...]:
        readings = self._cards.read()
        told = any(reading.own_used_bytes is not None for reading in readings)
        return tuple(reading for reading in readings if reading.own_used_bytes) if told else readings


class Onlooker:
    """`look()` gives what the live file of a monitored run would hold."""

    def __init__(self, pid: int, *, first_wait_s: float = 0.5) -> None:
        from hfopt.hardware.host import host

        try:
            process = psutil.Process(pid)
            tree = [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.Error as error:
            raise LogError(f"there is no process {pid} that can be read", hint="see `ps` for the process id of the training") from error
        cards = open_cards(None, tree)
        source = CardsOf(cards) if isinstance(cards, OwnCards) else None
        self._pid, self._points = pid, deque[dict[str, float | None]](maxlen=120)
        self._sampler = Sampler(gpus=source, host=HostProbe(pid, cores=host().cores), faults=Faults(to_stderr), ring=2)
        self._sampler.tick()
        time.sleep(first_wait_s)  # CPU shares are over the time between two readings

    def look(self) -> dict[str, Any]:
        alive = psutil.pid_exists(self._pid)
        sample = self._sampler.tick() if alive else self._sampler.latest
        assert sample is not None
        self._points.append(point(sample, None))
        status = status_line(sample, None)
        return {"time": time.time(), "pid": self._pid, "ended": not alive, "status": status, "points": list(self._points)}
