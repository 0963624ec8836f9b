"""The step time of a rehearsed script: what it launched, priced by the model that prices traces, and laid out in time.

`launch_cost` gives each launch its cost, `StepTimer` makes seconds of it, `launch_timeline` a step. The host's part: every launch of a
forward, a backward and an update takes what the table says of a server's CPU (`efficiency.toml`), the model's own Python in between
included; what the loop around them does (data, callbacks, clipping, logging) was measured here in CPU seconds, and is scaled by what this
host needed for those launches, that Python included, against the same table. So a server of that table is predicted for, not this host,
and the table's own figures for the loop, which a trace has, were found in the same way. Known limits: a script whose Python is slow
evenly, at every launch, is taken for a usual one; what a data worker waits for (a disk, a network) is not seen.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hfopt.schema import Gpu, OpCost, Precision, RehearsedPhase, RehearsedTime, StepTime
from hfopt.speed.device_speed import HostCost, Speed, speed_of
from hfopt.speed.launch_timeline import IssuedEvent, LaidOutStep, lay_out
from hfopt.speed.step_time import StepTimer, lost_to_ranks_s
from hfopt.virtual.launch_cost import OUTSIDE, Entry, Issue, ProcessJournal, RecordedStep, fetch_seconds, grouped, issues, read_journal

PHASES = ("data", "forward", "backward", "optimizer", "between")
LAUNCHING = ("forward", "backward", "optimizer")
LONG = 100.0  # times the usual gap between two launches: then the host did something else than a model's own Python


def rehearsed_time(folder: Path, gpu: Gpu, reports: Sequence[Mapping[str, Any]]) -> RehearsedTime | None:
    """From the journals of a rehearsal, for the rank that takes longest; None where no step was written down or the card has no speed."""
    speed = speed_of(gpu)
    if speed is None:
        return None
    by_pid = {str(report["pid"]): report for report in reports}
    fetched = fetch_seconds(folder)
    fetch_s = statistics.median(fetched) if fetched else 0.0
    timed = []
    for path in sorted(folder.glob("journal-*.tsv")):
        found = _Pricing(read_journal(path), gpu, speed, fetch_s).time(by_pid.get(path.stem.split("-")[1], {}))
        if found is not None:
            timed.append(found)
    return max(timed, key=lambda one: one.step_s, default=None)


def step_clock(folder: Path, pid: str, gpu: Gpu) -> dict[str, Any] | None:
    """What the clock of a rehearsed process shows in the course of a step, as csrc/clock.c wants it: nanoseconds since the step began, of
    the host and of the card, before the first launch of each visit of a phase and after each one. None where no step can be priced yet."""
    speed, journal = speed_of(gpu), folder / f"journal-{pid}.tsv"
    if speed is None or not journal.exists():
        return None
    fetched = fetch_seconds(folder)
    return _Pricing(read_journal(journal), gpu, speed, statistics.median(fetched) if fetched else 0.0).clock()


# ---------------------------------------------------------------------------------------------- the host


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostWork:
    """What the host did besides launching, in seconds of the table's host: before each launch of each visit of a phase."""

    scale: float | None = None  # seconds of the table's host for one of this host; None: not measured
    before_s: Mapping[tuple[int, int], float] = field(default_factory=dict)


def _host_work(steps: Sequence[RecordedStep], table: HostCost) -> _HostWork:
    """From the steps without operations: of several the middle one, for what a busy machine or a collection of garbage adds is in few."""
    by_step = [[one for one in step.entries[1:] if (one.launches or one.ends) and one.phase not in OUTSIDE] for step in steps]
    entries = [entry for of_step in by_step for entry in of_step]
    launching = {phase: [one for one in entries if one.launches and one.phase == phase] for phase in LAUNCHING}
    longest_s = {phase: LONG * statistics.median(one.spent_s for one in found) for phase, found in launching.items() if found}
    by_table = {"forward": table.forward_s, "backward": table.backward_s}
    usual = [one for phase in by_table for one in launching[phase] if one.spent_s <= longest_s[phase]]
    spent_s = sum(one.spent_s for one in usual)
    if not spent_s:
        return _HostWork()
    scale = sum(by_table[one.phase] for one in usual) / spent_s
    seen: list[dict[tuple[int, int], float]] = []
    for of_step in by_step:
        seen.append({})
        for entry in of_step:
            if entry.ends or entry.spent_s > longest_s.get(entry.phase, 0.0):
                place = (entry.visit, entry.place)
                seen[-1][place] = seen[-1].get(place, 0.0) + entry.spent_s * scale
    places = {place for one in seen for place in one}
    return _HostWork(scale=scale, before_s={place: statistics.median_low(one.get(place, 0.0) for one in seen) for place in places})


# ---------------------------------------------------------------------------------------------- the card


@dataclass(frozen=True, kw_only=True, slots=True)
class _Laid:
    timeline: LaidOutStep
    entries: tuple[Entry, ...]  # one for each event that was laid out
    by_timer: StepTime
    launches: int
    phase_launches: Mapping[str, int]
    shares: Mapping[str, float]


class _Pricing:
    """One process's journal on one card."""

    def __init__(self, journal: ProcessJournal, gpu: Gpu, speed: Speed, fetch_s: float) -> None:
        self._journal, self._speed, self._fetch_s = journal, speed, fetch_s
        self._link_bytes_per_s = {"host": gpu.pcie_bytes_per_s, "ranks": speed.link_bytes_per_s}

    def time(self, report: Mapping[str, Any]) -> RehearsedTime | None:
        laid, host = self._laid()
        return _result(laid, host, report) if laid else None

    def clock(self) -> dict[str, Any] | None:
        laid, _ = self._laid()
        return _clock(laid[-1]) if laid else None

    def _laid(self) -> tuple[list[_Laid], _HostWork]:
        host = _host_work([step for step in self._journal.steps if not step.with_operations], self._speed.host)
        return [self._step(step, host) for step in self._journal.steps if step.with_operations], host

    def _step(self, step: RecordedStep, host: _HostWork) -> _Laid:
        found = list(issues(step, self._journal.kernel_names))
        ops = grouped(found)
        precision: Precision = "tf32" if step.facts.get("tf32") == "1" else "fp32"
        timer = StepTimer(ops, self._speed, precision)
        seconds = {replace(op, count=1.0): each for op, each in zip(ops, timer.each_kernel_s(1), strict=True)}
        pairs = list(self._events(found, host, seconds))
        events = [event for _, event in pairs]
        workers = int(step.facts.get("workers", "0"))
        batches = int(step.facts.get("micro_batches", "1"))
        fetch_s = self._fetch_s * (host.scale or 1.0) * batches / workers if workers else 0.0
        timeline = lay_out(events, sync_s=self._speed.host.sync_s, fetch_s=fetch_s)
        _wait_for_ranks(timeline, step, events)
        launched = [event for event in events if event.kind == "launch"]
        kinds: dict[str, float] = {}
        for op, each in zip(ops, timer.each_kernel_s(1), strict=True):
            kind = "optimizer" if op.phase == "optimizer" else op.kind
            kinds[kind] = kinds.get(kind, 0.0) + op.count * each / timeline.step_s
        return _Laid(
            timeline=timeline,
            entries=tuple(entry for entry, _ in pairs),
            by_timer=timer.at(1),
            launches=len(launched),
            phase_launches={phase: sum(event.phase == phase for event in launched) for phase in PHASES},
            shares=kinds,
        )

    def _events(self, found: Sequence[Issue], host: _HostWork, seconds: Mapping[OpCost, float]) -> Iterator[tuple[Entry, IssuedEvent]]:
        work_s = input_s = 0.0
        for issue in found:
            entry = issue.entry
            if entry.launches or entry.ends:
                spent_s = host.before_s.get((entry.visit, entry.place), 0.0)
                work_s, input_s = work_s + spent_s, input_s + (spent_s if entry.phase == "data" else 0.0)
            if (entry.kind in ("phase", "step", "op") and issue.cost is None) or entry.phase in OUTSIDE:
                continue
            event = replace(self._event(issue, seconds), work_s=work_s, input_s=input_s)
            work_s = input_s = 0.0
            yield entry, event

    def _event(self, issue: Issue, seconds: Mapping[OpCost, float]) -> IssuedEvent:
        entry, cost = issue.entry, self._speed.host
        phase = entry.phase or "forward"
        if issue.link is None and issue.cost is None:
            kind: Any = entry.kind
            name = entry.fields[0] if entry.fields else ""
            stream = entry.stream if name != "device" else ""
            return IssuedEvent(kind=kind, phase=phase, stream=stream, event=name if name.startswith("0x") else "")
        launch_s = {"backward": cost.backward_s, "optimizer": cost.optimizer_s}.get(phase, cost.forward_s)
        if issue.cost is not None:
            device_s = seconds[issue.cost]
        else:
            rate = self._link_bytes_per_s[issue.link or "host"]
            device_s = self._speed.kernel_floor_s + (issue.link_bytes / rate if rate else 0.0)
        kind = "collective" if issue.link == "ranks" else "launch"
        return IssuedEvent(kind=kind, phase=phase, launch_s=launch_s, device_s=device_s, stream=entry.stream)


def _wait_for_ranks(timeline: LaidOutStep, step: RecordedStep, events: Sequence[IssuedEvent]) -> None:
    """As a trace is priced."""
    ranks = max((int(entry.fields[1]) for entry in step.entries if entry.kind == "nccl"), default=1)
    sent_s = sum(event.device_s for event in events if event.kind == "collective")
    hidden_s = max(0.0, sent_s - timeline.idle_s.get("communication", 0.0))
    lost_s = lost_to_ranks_s(ranks, timeline.step_s, hidden_s, busy_share=timeline.busy_s / timeline.step_s)
    timeline.wait("communication", "backward", lost_s)


def _clock(laid: _Laid) -> dict[str, Any]:
    """Between two launches it stands."""
    visits: dict[int, list[tuple[float, float]]] = {}
    reached = (0.0, 0.0)
    for entry, mark in zip(laid.entries, laid.timeline.marks, strict=True):
        for visit in range(len(visits), entry.visit + 1):
            visits[visit] = [reached]
        if entry.launches or entry.kind == "op":
            reached = mark
            places = visits[entry.visit]
            after = entry.place + entry.launches
            places += [places[-1]] * (after + 1 - len(places))
            places[after] = mark
    starts = [0]
    for places in visits.values():
        starts.append(starts[-1] + len(places))
    times = [round(1e9 * seconds) for places in visits.values() for pair in places for seconds in pair]
    return {"step_ns": round(1e9 * laid.timeline.step_s), "starts": starts, "times_ns": times}


def _result(laid: Sequence[_Laid], host: _HostWork, report: Mapping[str, Any]) -> RehearsedTime:
    """The mean of the steps."""

    def mean(values: Sequence[float]) -> float:
        return statistics.fmean(values)

    step_s = mean([one.timeline.step_s for one in laid])
    batch, accumulation = report.get("micro_batch"), report.get("accumulation", 1)
    first = laid[0].by_timer
    phases = [
        RehearsedPhase(
            phase=phase,
            wall_s=mean([one.timeline.phase_s.get(phase, 0.0) for one in laid]),
            busy_s=mean([one.timeline.phase_busy_s.get(phase, 0.0) for one in laid]),
            launches=round(mean([one.phase_launches[phase] for one in laid])),
        )
        for phase in PHASES
    ]
    causes = sorted({cause for one in laid for cause in one.timeline.idle_s})
    kinds = sorted({kind for one in laid for kind in one.shares})
    shares = {kind: mean([one.shares.get(kind, 0.0) for one in laid]) for kind in kinds}
    return RehearsedTime(
        step_s=step_s,
        busy_s=mean([one.timeline.busy_s for one in laid]),
        samples_per_s=batch * accumulation * report.get("world_size", 1) / step_s if batch else None,
        steps=len(laid),
        launches=round(mean([one.launches for one in laid])),
        phases=tuple(phase for phase in phases if phase.wall_s or phase.launches),
        idle_s={cause: mean([one.timeline.idle_s.get(cause, 0.0) for one in laid]) for cause in causes},
        shares=dict(sorted(shares.items(), key=lambda item: -item[1])),
        clock_share=first.clock_share,
        power_w=first.power_w,
        rate_error=first.rate_error,
        host_scale=host.scale,
    )
