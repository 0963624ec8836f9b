"""A run, or two on one clock, as a page: how fast, where the time went, the machine over time, and each finding where it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfopt.report import html
from hfopt.schema import RunDifference, RunPoint, RunView
from hfopt.units import GIB, format_bytes, format_percent, format_rate, format_seconds

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


def run_page(run: RunView) -> bytes:
    pieces = [html.paragraph(run.what), html.paragraph(f"{run.name}: {run.ending}", css="soft"), _tiles(run)]
    pieces += [html.paragraph(note) for note in run.notes]
    pieces.append(html.section("What was found", _marks([run])))
    if run.points:
        pieces += _charts([run])
    return html.page("hfopt run", *pieces)


def comparison_page(before: RunView, after: RunView, figures: Sequence[RunDifference], settings: Sequence[RunDifference]) -> bytes:
    pieces = [html.paragraph(f"before: {before.name}: {before.what}; {before.ending}", css="soft")]
    pieces.append(html.paragraph(f"after: {after.name}: {after.what}; {after.ending}", css="soft"))
    pieces += [html.paragraph(note) for run in (before, after) for note in run.notes]
    pieces.append(_gains(before, after))
    rows = [(row.what, row.before, row.after, html.Toned(f"{row.change} {row.verdict}".strip(), row.verdict)) for row in figures]
    pieces.append(html.section("Before and after", html.table(("", "before", "after", "change"), rows)))
    changed = [(row.what, row.before, row.after) for row in settings]
    pieces.append(html.section("Settings that differ", html.table(("key", "before", "after"), changed)) if changed else "")
    pieces.append(html.section("What was found", _marks([before, after])))
    if before.points and after.points:
        pieces += _charts([before, after])
    return html.page("hfopt: before and after", *pieces)


def _tiles(run: RunView) -> str:
    figures = run.figures
    shown: list[tuple[float | None, Callable[[float], str], str]] = [
        (figures.get("samples_per_s"), lambda value: format_rate(value, "samples"), "throughput"),
        (figures.get("tokens_per_s"), lambda value: format_rate(value, "tokens"), "with padding"),
        (figures.get("step_s"), format_seconds, "a step, without logging, evaluation and saving"),
        (figures.get("gpu_util"), lambda value: f"{value:.0f} %", "GPU utilization"),
        (figures.get("mfu"), format_percent, "MFU"),
        (figures.get("data_wait"), format_percent, "of the training time waiting for data"),
        (figures.get("memory_reserved_gib"), lambda value: f"{value:.2f} GiB", "reserved at the peak"),
        (figures.get("gpu_power_w"), lambda value: f"{value:.0f} W", "mean power"),
        (figures.get("cpu_util"), lambda value: f"{value:.0f} %", "CPU utilization"),
    ]
    return html.tiles([(form(value), caption) for value, form, caption in shown if value is not None])


def _gains(before: RunView, after: RunView) -> str:
    def both(name: str, form: Callable[[float, float], str], caption: str) -> list[tuple[str, str]]:
        old, new = before.figures.get(name), after.figures.get(name)
        return [(form(old, new), caption)] if old and new is not None else []

    return html.tiles(
        [
            *both("samples_per_s", lambda old, new: f"{new / old:.2f}×", "the throughput"),
            *both("data_wait", lambda old, new: f"{format_percent(old)} → {format_percent(new)}", "data wait"),
            *both("mfu", lambda old, new: f"{format_percent(old)} → {format_percent(new)}", "MFU"),
            *both("gpu_util", lambda old, new: f"{old:.0f} % → {new:.0f} %", "GPU utilization"),
        ]
    )


def _marks(runs: Sequence[RunView]) -> str:
    several = len(runs) > 1
    rows = [
        (mark_name(number if several else None, place), f"step {mark.step}", mark.title, mark.words)
        for number, run in enumerate(runs)
        for place, mark in enumerate(run.marks, start=1)
    ]
    if not rows:
        return html.paragraph("Nothing was found.")
    return html.paragraph("The charts have a dotted line where each began.", css="soft") + html.table(
        ("", "began", "what", "why"), rows, stack=True
    )


def _charts(runs: Sequence[RunView]) -> list[str]:
    pieces = [
        _chart("Utilization", utilization(runs), "Utilization over time"),
        _chart("Memory", memory(runs), "Memory over time"),
    ]
    if len(runs) == 1:  # the wait for data is a part of it
        pieces.append(_chart("Where the time went", where_time_went(runs[0]), "Shares of the time over the run"))
    else:
        pieces.append(_chart("Data wait", data_wait(runs), "Share of the training time spent waiting for data"))
    if any(has(run, POWER) for run in runs):
        pieces.append(_chart("Power", power(runs), "Power over time"))
    pieces.append(_chart("Throughput", throughput(runs), "Samples per second over time"))
    return pieces


def _chart(title: str, drawn: Figure, label: str) -> str:
    return html.section(title, html.chart(drawn, label=label))
