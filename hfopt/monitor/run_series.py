"""A run read back, as the page shows it: windows on the run's own clock, findings where they began."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfopt.monitor import run_text
from hfopt.monitor.findings import sentence
from hfopt.monitor.history import History
from hfopt.monitor.metrics import PREFIX, metrics
from hfopt.monitor.window import merge
from hfopt.schema import RunMark, RunPoint, RunView, Window
from hfopt.units import format_seconds

_MOST_POINTS = 600  # more cannot be told apart on a screen


def view(history: History) -> RunView:
    began_time, total = history.header["time"], history.total
    windows = _thinned(history.windows)
    cards = total.gpus if total is not None else ()
    limits_w = [card.power_limit_w for card in cards if card.power_limit_w]
    return RunView(
        name=str(history.path.parent.parent if history.path.parent.name == "hfopt" else history.path.parent),
        what=run_text.what(history),
        ending=run_text.ending(history),
        begin_s=max(0.0, windows[0][0] - began_time - windows[0][1].seconds) if windows else 0.0,
        points=tuple(_point(written - began_time, window) for written, window in windows),
        marks=_marks(history),
        figures=_plain(history.figures),
        card_bytes=min((card.total_bytes for card in cards if card.total_bytes), default=None),
        ram_bytes=total.ram_total_bytes if total is not None else None,
        power_limit_w=sum(limits_w) if limits_w and len(limits_w) == len(cards) else None,
        notes=(*([] if total is not None else [run_text.NO_WINDOW]), *run_text.failures(history)),
    )


def _thinned(windows: tuple[tuple[float, Window], ...]) -> list[tuple[float, Window]]:
    """Neighbours joined until they are few enough."""
    each = -(-len(windows) // _MOST_POINTS)
    groups = [windows[start : start + each] for start in range(0, len(windows), each)] if windows else []
    return [(group[-1][0], merge([window for _, window in group])) for group in groups]


def _point(until_s: float, window: Window) -> RunPoint:
    return RunPoint(until_s=until_s, last_step=window.last_step, figures=_plain(metrics(window)), shares=run_text.shares(window))


def _plain(figures: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in figures.items()}


def _marks(history: History) -> tuple[RunMark, ...]:
    began_time = history.header["time"]
    found = [_finding(history, entry, began_time) for entry in history.findings]
    found += [_fallback(entry, began_time) for entry in history.fallbacks]
    return tuple(sorted(found, key=lambda mark: mark.at_s))


def _finding(history: History, entry: Mapping[str, Any], began_time: float) -> RunMark:
    """It is told at the end of the window it showed in, so it began with that window at the latest."""
    own = [(written, window) for written, window in history.windows if window.last_step == entry["step"]]
    began = min((written - window.seconds for written, window in own), default=entry["time"])
    end = history.end_of(entry)
    words = sentence(run_text.finding_from(entry)).removeprefix(f"{entry['cause']}: ")
    if end is not None:
        words += f" [resolved at step {end['step']}, after {format_seconds(end['time'] - began)}]"
    step = min((window.first_step for _, window in own), default=entry["step"])
    return RunMark(title=entry["cause"], words=words, step=step, at_s=max(0.0, began - began_time))


def _fallback(entry: Mapping[str, Any], began_time: float) -> RunMark:
    seen, step = entry.get("seen", {}), entry.get("step", {})
    return RunMark(
        title="out of memory",
        words=f"in {seen.get('phase', 'training')} with {seen.get('micro_batch', '?')} samples: {step.get('reason', 'went on')}",
        step=seen["step"] if isinstance(seen.get("step"), int) else 0,
        at_s=entry["time"] - began_time,
    )
