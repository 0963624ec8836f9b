"""What `hfopt watch` shows: progress, loss, ETA, the share of the machine, curves of the last two minutes, and what was found.

A process can also be watched from outside: its CPU and RAM by psutil, the cards it holds memory on by NVML; its steps are not known.
"""

from __future__ import annotations

import html
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hfopt.errors import LogError
from hfopt.monitor.fault_guard import Faults, to_stderr
from hfopt.monitor.host_usage import HostProbe
from hfopt.monitor.log import LIVE, checked, point
from hfopt.monitor.metrics import status_line
from hfopt.monitor.sampler import OwnCards, Sampler, open_cards
from hfopt.redact import printable
from hfopt.schema import GpuReading
from hfopt.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


class CardsOfProcess:
    """Of all cards those on which the processes hold memory; every card if the driver does not tell who holds what."""

    def __init__(self, cards: OwnCards) -> None:
        self._cards = cards

    def read(self) -> tuple[GpuReading, ...]:
        readings = self._cards.read()
        known = any(reading.own_used_bytes is not None for reading in readings)
        return tuple(reading for reading in readings if reading.own_used_bytes) if known else readings


class ProcessWatcher:
    """`look()` gives what the live file of a monitored run would hold."""

    def __init__(self, pid: int, *, first_wait_s: float = 0.5) -> None:
        from hfopt.hardware.detect import host

        try:
            process = psutil.Process(pid)
            tree = [pid, *(child.pid for child in process.children(recursive=True))]
        except psutil.Error as error:
            raise LogError(f"there is no process {pid} that can be read", hint="see `ps` for the process id of the training") from error
        cards = open_cards(None, tree)
        source = CardsOfProcess(cards) if isinstance(cards, OwnCards) else None
        self._pid, self._points, self._cores = pid, deque[dict[str, float | None]](maxlen=120), host().cores
        self._sampler = Sampler(gpus=source, host=HostProbe(pid, cores=self._cores), faults=Faults(to_stderr), ring=2)
        self._sampler.tick()
        time.sleep(first_wait_s)  # CPU shares are over the time between two readings

    def look(self) -> dict[str, Any]:
        alive = psutil.pid_exists(self._pid)
        sample = self._sampler.tick() if alive else self._sampler.latest
        assert sample is not None
        self._points.append(point(sample, None))
        status = status_line(sample, None)
        seen = {"status": status, "points": list(self._points), "cores": self._cores}
        return {"time": time.time(), "pid": self._pid, "ended": not alive, **seen}


_LEVELS = " ▁▂▃▄▅▆▇█"
_CURVES = (("gpu", "GPU"), ("vram", "VRAM"), ("cpu", "CPU"), ("ram", "RAM"), ("data_wait", "data wait"), ("core_wait", "core wait"))
_LIVE: Mapping[str, Any] = {
    "time": float,
    "pid": int,
    "points": tuple[Mapping[str, float | None], ...],
    "ended": bool,
    "step": int,
    "max_steps": int | None,
    "status": str,
    "pace": str,
    "loss": float | None,
    "s_per_step": float | None,
    "cores": float | None,
    "findings": tuple[str, ...],
}
"""What is read back, and of which type; the others of a newer version are passed over."""
_MUST = ("time", "pid", "points")
_SCARCE = 0.30  # of the time: from here on the wait for a core is worth a line of its own
_STALE_S = 10.0


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` shares (0..1) as bars; a gap where there is no reading."""
    shown = list(values)[-width:]
    return "".join(" " if value is None else _LEVELS[max(1, min(8, round(8 * value)))] for value in shown)


def find_live(run: Path) -> Path:
    """The live file of a run: in its folder, below its output_dir, or the newest below the given folder."""
    for path in (run / LIVE, run / "hfopt" / LIVE):
        if path.is_file():
            return path
    if not run.exists():
        raise LogError(f"there is no {run}", hint="give the output_dir of a run that HFGpuMonitor watches, or --pid")
    found = sorted(run.glob(f"*/hfopt/{LIVE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise LogError(f"no run with HFGpuMonitor is in {run}", hint="give its output_dir, or the process with --pid PID")
    return found[-1]


def read_live(path: Path) -> dict[str, Any]:
    """The file is replaced as a whole, so it is either there and complete or not there."""
    try:
        content = json.loads(path.read_text())
        return {name: checked(content[name], kind, name) for name, kind in _LIVE.items() if name in content or name in _MUST}
    except (OSError, ValueError, RecursionError) as error:
        raise LogError(f"cannot read {path}: {error}") from error
    except (TypeError, KeyError) as error:
        raise LogError(f"{path} is not a live file of HFGpuMonitor: {error}") from error


def condition(live: Mapping[str, Any]) -> str:
    """running, ended, or gone: the process is no more and did not say that it ended."""
    if live.get("ended"):
        return "ended"
    fresh = abs(time.time() - live["time"]) < _STALE_S  # a clock that was set back makes no old sign a new one
    there = live["pid"] < 1 << 31 and psutil.pid_exists(live["pid"])  # a larger number is no process, and more than a C int holds
    return "running" if fresh or there else "gone"


def lines(live: Mapping[str, Any], width: int) -> list[str]:
    """The screen as plain text."""
    state = condition(live)
    step, steps = live.get("step", 0), live.get("max_steps") or 0
    said = {"running": "", "ended": ", ended", "gone": f", gone: last sign {format_seconds(time.time() - live['time'])} ago"}[state]
    progress = f", step {step} of {steps} ({100 * step / steps:.0f} %)" if steps else ""
    shown = [f"process {live['pid']}{progress}{said}", *_learning(live, state)]
    if live.get("status"):
        shown.append(live["status"])
    if live.get("pace"):
        shown.append(live["pace"])
    shown += _share(live, state)
    for key, title in _CURVES:
        values = [point.get(key) for point in live["points"]]
        known = [value for value in values if value is not None]
        if known:
            shown.append(f"{title:<10}{100 * known[-1]:>5.1f}%  {sparkline(values, max(10, min(120, width - 20)))}")
    shown += [f"! {finding}" for finding in live.get("findings", ())]
    return shown


def _learning(live: Mapping[str, Any], state: str) -> list[str]:
    """The last loss, and how long the rest takes at the pace of the last window."""
    parts = []
    if (loss := live.get("loss")) is not None:
        parts.append(f"loss {loss:.4g}")
    left, each_s = (live.get("max_steps") or 0) - live.get("step", 0), live.get("s_per_step")
    if each_s and left > 0 and state == "running":
        end = time.strftime("%H:%M", time.localtime(time.time() + left * each_s))
        parts.append(f"ETA {format_seconds(left * each_s)} ({end}), {format_seconds(each_s)} a step")
    return [", ".join(parts)] if parts else []


def _share(live: Mapping[str, Any], state: str) -> list[str]:
    """What this run has of the machine, and whether others take it."""
    last: Mapping[str, float | None] = live["points"][-1] if live["points"] else {}
    used, cores, wait = last.get("cpu"), live.get("cores"), last.get("core_wait")
    if used is None or not cores:
        return []
    scarce = wait is not None and wait >= _SCARCE
    has, waiting, use = ("has", "waits", "use") if state == "running" else ("had", "waited", "used")
    waits = f"; its main thread {waiting} {100 * (wait or 0.0):.0f} % of the time for a core: others {use} the machine" if scarce else ""
    return [f"this run {has} {used * cores:.2f} of {cores:g} cores ({100 * used:.0f} %){waits}"]


def live_html(run: Path) -> str:
    """The same for a notebook; a run that is not there yet is said."""
    try:
        path = find_live(run)
        text = "\n".join([str(path.parent), *lines(read_live(path), 100)])
    except LogError as error:
        text = str(error)
    return f"<pre>{html.escape(printable(text))}</pre>"


def render(live: Mapping[str, Any], title: str, width: int) -> RenderableType:
    from rich.panel import Panel
    from rich.text import Text

    text = Text()
    for index, line in enumerate(lines(live, width - 4)):
        style = "yellow" if line.startswith("!") else "bold" if index == 0 else ""
        text.append(("\n" if index else "") + line, style=style)
    return Panel(text, title=Text(title), title_align="left", border_style="green" if condition(live) == "running" else "red")
