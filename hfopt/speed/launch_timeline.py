"""Launches laid out in time: the host that issues them, the streams that run them, and what the card waits for in between.

The host works, launches and sometimes waits; a launch starts when it was issued, its stream is free and what the stream waits for is over.
The same step is laid out a few times in a row, and the last one counts, so that what runs on into the next step is counted once. A gap in
which no kernel runs is put down to what the host did in it: fetching data, launching, waiting, or the script's own Python; or to
communication, where the stream waits for it. Time on the card belongs to the phase of the kernel that ran, a gap to the phase the host
was in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Cause = Literal["input", "launch", "sync", "python", "communication"]
REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class IssuedEvent:
    """One thing the host does to the card, and what it did before."""

    kind: Literal["launch", "collective", "sync", "record", "wait"]
    phase: str
    launch_s: float = 0.0  # of the host, for the launch itself
    work_s: float = 0.0  # of the host, before it: the script's own Python, or fetching data
    input_s: float = 0.0  # the part of that in which data is fetched
    device_s: float = 0.0
    stream: str = ""
    event: str = ""  # recorded or waited for; a sync without one and without a stream waits for all


@dataclass(slots=True)
class LaidOutStep:
    """One step: its length, and where it went."""

    step_s: float = 0.0
    busy_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)
    phase_busy_s: dict[str, float] = field(default_factory=dict)
    idle_s: dict[str, float] = field(default_factory=dict)
    marks: list[tuple[float, float]] = field(default_factory=list)  # after each event, since the step began: the host, all of the card

    def wait(self, cause: Cause, phase: str, seconds: float) -> None:
        """The card waits so much longer."""
        if seconds > 0:
            _add(self.idle_s, cause, seconds)
            _add(self.phase_s, phase, seconds)
            self.step_s += seconds


@dataclass(frozen=True, slots=True)
class _Stretch:
    """What the host did, and when."""

    start_s: float
    end_s: float
    cause: Cause
    phase: str


class _Layout:
    def __init__(self, sync_s: float) -> None:
        self._sync_s = sync_s
        self.host_s = 0.0
        self.front_s = 0.0  # until when kernels other than collectives have run
        self.seen = LaidOutStep()
        self._streams: dict[str, float] = {}
        self._events: dict[str, tuple[float, bool]] = {}
        self._held: dict[str, float] = {}  # by stream: until when communication holds it
        self._collective: set[str] = set()  # streams that have only seen collectives
        self._done: list[_Stretch] = []

    def begin(self) -> None:
        self.seen = LaidOutStep()

    def take(self, event: IssuedEvent) -> None:
        self._host(event.input_s, "input", event.phase)
        self._host(event.work_s - event.input_s, "python", event.phase)
        self._host(event.launch_s, "launch", event.phase)
        if event.kind == "launch":
            self._launch(event)
        elif event.kind == "collective":
            self._collective.add(event.stream)
            self._streams[event.stream] = max(self.host_s, self._streams.get(event.stream, 0.0)) + event.device_s
        elif event.kind == "record":
            self._events[event.event] = (self._streams.get(event.stream, 0.0), event.stream in self._collective)
        elif event.kind == "wait":
            self._wait(event)
        else:
            self._sync(event)

    def _host(self, seconds: float, cause: Cause, phase: str) -> None:
        if seconds > 0:
            self._done.append(_Stretch(self.host_s, self.host_s + seconds, cause, phase))
            self.host_s += seconds

    def _wait(self, event: IssuedEvent) -> None:
        until, collective = self._events.get(event.event, (0.0, False))
        if until > self._streams.get(event.stream, 0.0):
            self._streams[event.stream] = until
            if collective:
                self._held[event.stream] = until

    def _sync(self, event: IssuedEvent) -> None:
        if event.event:
            until = self._events.get(event.event, (0.0, False))[0]
        else:
            until = self._streams.get(event.stream, 0.0) if event.stream else max(self._streams.values(), default=0.0)
        self._host(until - self.host_s, "sync", event.phase)
        self._host(self._sync_s, "sync", event.phase)

    def _launch(self, event: IssuedEvent) -> None:
        start = max(self.host_s, self._streams.get(event.stream, 0.0))
        end = self._streams[event.stream] = start + event.device_s
        if start > self.front_s:
            self._idle(self.front_s, start, event)
            self.front_s = start
        if end > self.front_s:
            busy = end - self.front_s
            self.seen.busy_s += busy
            _add(self.seen.phase_busy_s, event.phase, busy)
            _add(self.seen.phase_s, event.phase, busy)
            self.front_s = end

    def _idle(self, start: float, end: float, event: IssuedEvent) -> None:
        """From the end backwards: communication that held the stream, then what the host did last."""
        held = min(self._held.get(event.stream, 0.0), end)
        if held > max(start, self.host_s):
            self._gap(held - max(start, self.host_s), "communication", event.phase)
            end = max(start, self.host_s)
        while end > start and self._done:
            last = self._done[-1]
            if last.end_s <= start:
                break
            self._gap(min(end, last.end_s) - max(start, last.start_s), last.cause, last.phase)
            end = max(start, min(end, last.start_s))
            if last.start_s < start:
                break
            self._done.pop()
        self._gap(end - start, "launch", event.phase)

    def _gap(self, seconds: float, cause: Cause, phase: str) -> None:
        if seconds > 0:
            _add(self.seen.idle_s, cause, seconds)
            _add(self.seen.phase_s, phase, seconds)


def _add(into: dict[str, float], key: str, seconds: float) -> None:
    into[key] = into.get(key, 0.0) + seconds


def lay_out(events: Sequence[IssuedEvent], *, sync_s: float, fetch_s: float = 0.0) -> LaidOutStep:
    """One step of many alike. `fetch_s`: what the workers need for the data of one step, all together; a step takes no less."""
    layout = _Layout(sync_s)
    before = 0.0
    for _ in range(REPEATS):
        before, began_s = layout.front_s, layout.host_s
        layout.begin()
        for event in events:
            layout.take(event)
            layout.seen.marks.append((layout.host_s - began_s, max(layout.host_s, layout.front_s) - began_s))
    seen = layout.seen
    seen.step_s = layout.front_s - before
    seen.wait("input", "data", fetch_s - seen.step_s)
    return seen
