"""The charts of a run, or of two on one clock: each window is a step of the line, findings are lines where they began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfopt.report import html
from hfopt.schema import RunPoint, RunView
from hfopt.units import GIB, format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

BEFORE, AFTER = html.PALETTE[1], html.PALETTE[0]
_TIME_COLOURS = {
    "forward+backward": html.PALETTE[0],
    "optimizer": html.PALETTE[4],
    "data wait": html.PALETTE[3],
    "evaluation": html.PALETTE[1],
    "saving": html.PALETTE[6],
    "logging": html.PALETTE[5],
    "other": html.PALETTE[7],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One metric of the windows."""

    metric: str
    label: str
    unit: str
    scale: float = 1.0
    band: tuple[str, str] | None = None  # metrics of the lowest and the highest reading


GPU = Line(metric="gpu_util", label="GPU", unit="%", band=("gpu_util_min", "gpu_util_max"))
CPU = Line(metric="cpu_util", label="CPU", unit="%")
THREAD = Line(metric="main_thread_util", label="training thread", unit="%")
USED = Line(metric="gpu_memory_used_gib", label="in use on the card", unit="GiB")
RESERVED = Line(metric="memory_reserved_gib", label="reserved by torch, peak so far", unit="GiB")
ALLOCATED = Line(metric="memory_allocated_gib", label="allocated by torch, peak so far", unit="GiB")
RAM = Line(metric="ram_used_gib", label="RAM of the machine", unit="GiB")
DATA_WAIT = Line(metric="data_wait", label="data wait", unit="%", scale=100.0)
POWER = Line(metric="gpu_power_w", label="power", unit="W")
PACE = Line(metric="samples_per_s", label="samples/s", unit="/s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """Seconds after the beginning in the unit that suits the longest run."""

    unit: str
    seconds: float

    @classmethod
    def of(cls, runs: Sequence[RunView]) -> Clock:
        longest_s = max((point.until_s for run in runs for point in run.points), default=0.0)
        unit, seconds = ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 3 * 3600 else ("h", 3600.0)
        return cls(unit=unit, seconds=seconds)

    def edges(self, run: RunView) -> list[float]:
        """Where the windows begin and end."""
        return [run.begin_s / self.seconds, *(point.until_s / self.seconds for point in run.points)]


def has(run: RunView, line: Line) -> bool:
    return any(line.metric in point.figures for point in run.points)


def _values(points: Sequence[RunPoint], metric: str, scale: float = 1.0) -> list[float | None]:
    """One for the left edge of the first window and one for the end of each."""
    found = [point.figures.get(metric) for point in points]
    scaled = [None if value is None else scale * value for value in found]
    return [scaled[0], *scaled]


def over_time(runs: Sequence[RunView], lines: Sequence[Line], *, title: str) -> Figure:
    """Two runs share a chart in two colours; of one run, each metric has its own."""
    drawn, clock = html.figure(), Clock.of(runs)
    several = len(runs) > 1
    for number, run in enumerate(runs):
        for index, line in enumerate(line for line in lines if has(run, line)):
            colour = (BEFORE, AFTER)[number] if several else html.PALETTE[index]
            name = f"{line.label}, {('before', 'after')[number]}" if several else line.label
            style = {"color": colour, "shape": "vh", "dash": "solid" if index == 0 else ("dash", "dot")[(index - 1) % 2]}
            x = clock.edges(run)
            if line.band and not several:
                _band(drawn, x, run, line, colour)
            y = _values(run.points, line.metric, line.scale)
            drawn.add_scatter(x=x, y=y, name=name, mode="lines", line=style, hovertemplate=f"%{{y:.4~g}} {line.unit}")
    _finish(drawn, runs, clock, title)
    return drawn


def _band(drawn: Figure, x: list[float], run: RunView, line: Line, colour: str) -> None:
    assert line.band is not None
    for metric, fill in zip(line.band, (None, "tonexty"), strict=True):
        drawn.add_scatter(
            x=x,
            y=_values(run.points, metric, line.scale),
            name=f"{line.label}, lowest to highest reading",
            showlegend=fill is not None,
            mode="lines",
            line={"width": 0, "shape": "vh", "color": colour},
            fill=fill,
            fillcolor=f"rgba({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))}, 0.15)",
            hoverinfo="skip",
        )


def where_time_went(run: RunView) -> Figure:
    drawn, clock = html.figure(), Clock.of([run])
    shares = {name: [100 * point.shares.get(name, 0.0) for point in run.points] for name in _TIME_COLOURS}
    layers = [html.Layer(name, _TIME_COLOURS[name], [y[0], *y]) for name, y in shares.items() if max(y) >= 0.5]
    html.stack(drawn, clock.edges(run), layers, shape="vh", hover="%{y:.1f} %")
    _finish(drawn, [run], clock, "% of the time")
    drawn.update_yaxes(range=[0, 100])
    return drawn


def utilization(runs: Sequence[RunView]) -> Figure:
    if len(runs) == 1:
        return over_time(runs, (GPU, CPU, THREAD), title="%")
    return over_time(runs, (GPU,) if any(has(run, GPU) for run in runs) else (CPU,), title="%")


def memory(runs: Sequence[RunView]) -> Figure:
    """On the card where there is one, else of the machine; with what there is at most."""
    on_card = any(has(run, line) for run in runs for line in (USED, RESERVED))
    drawn = over_time(runs, (RAM,) if not on_card else (USED, RESERVED, ALLOCATED) if len(runs) == 1 else (USED,), title="GiB")
    for size in sorted({size for run in runs if (size := run.card_bytes if on_card else run.ram_bytes)}):
        html.limit(drawn, size / GIB, f"{'card' if on_card else 'machine'}: {format_bytes(size)}")
    return drawn


def data_wait(runs: Sequence[RunView]) -> Figure:
    return over_time(runs, (DATA_WAIT,), title="% of the training time")


def throughput(runs: Sequence[RunView]) -> Figure:
    return over_time(runs, (PACE,), title="samples/s")


def power(runs: Sequence[RunView]) -> Figure:
    drawn = over_time(runs, (POWER,), title="W")
    for most_w in sorted({run.power_limit_w for run in runs if run.power_limit_w}):
        html.limit(drawn, most_w, f"limit: {most_w:.0f} W")
    return drawn


def _finish(drawn: Figure, runs: Sequence[RunView], clock: Clock, title: str) -> None:
    for number, run in enumerate(runs):
        colour = (BEFORE, AFTER)[number] if len(runs) > 1 else html.PALETTE[5]
        at_once: dict[float, list[str]] = {}
        for place, mark in enumerate(run.marks, start=1):
            at_once.setdefault(mark.at_s, []).append(mark_name(number if len(runs) > 1 else None, place))
        for at_s, names in at_once.items():
            drawn.add_vline(
                x=at_s / clock.seconds,
                line={"dash": "dot", "width": 1.5, "color": colour},
                annotation={"text": ", ".join(names), "font": {"color": colour}, "yanchor": "bottom", "xanchor": "center", "y": 1},
            )
    drawn.update_xaxes(title=f"{clock.unit} since the run began", rangemode="tozero")
    drawn.update_yaxes(title=title, rangemode="tozero")


def mark_name(run: int | None, place: int) -> str:
    """1, 2, … in the page of one run; b1, a1 in the page of two."""
    return str(place) if run is None else f"{'ba'[run]}{place}"
