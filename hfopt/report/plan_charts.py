"""The charts of a plan: memory over the step by category with its peak, and memory and throughput over the batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from hfopt.report import html
from hfopt.schema import BatchPoint, Checkpointing, PlanCharts, TimelinePoint
from hfopt.units import GIB, format_bytes, format_rate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_CATEGORIES = {  # from the bottom: what stays, then what comes and goes
    "context": html.PALETTE[7],
    "weights": html.PALETTE[0],
    "optimizer": html.PALETTE[5],
    "gradients": html.PALETTE[2],
    "activations": html.PALETTE[1],
    "logits": html.PALETTE[4],
    "temporaries": html.PALETTE[6],
}
_FEASIBLE = "rgba(84, 162, 75, 0.12)"


def over_step(charts: PlanCharts) -> Figure:
    points = charts.timeline
    drawn = html.figure()
    x = [100 * point.position for point in points]
    layers = [
        html.Layer(category, colour, [point.bytes_by_category.get(category, 0) / GIB for point in points])
        for category, colour in _CATEGORIES.items()
    ]
    html.stack(drawn, x, [layer for layer in layers if any(layer.y)], shape="hv", hover="%{y:.2f} GiB")
    _total(drawn, x, points)
    for phase, begin, end in _phases(points):
        if begin:
            drawn.add_vline(x=100 * begin, line={"width": 1, "color": html.PALETTE[7]})
        note = {"x": 50 * (begin + end), "y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}
        if end - begin > 0.08:
            drawn.add_annotation(text=html.in_chart(phase), **note)
    if charts.device_bytes is not None:
        html.limit(drawn, charts.device_bytes / GIB, f"card: {format_bytes(charts.device_bytes)}")
    if charts.peak is not None:
        _star(drawn, 100 * charts.peak.position, charts.peak.total_bytes / GIB, f"peak: {format_bytes(charts.peak.total_bytes)}")
    drawn.update_xaxes(title="% of the step's allocations and frees", range=[0, 100])
    drawn.update_yaxes(title="GiB", rangemode="tozero")
    return drawn


def _total(drawn: Figure, x: list[float], points: Sequence[TimelinePoint]) -> None:
    """Unseen, but it says under the pointer where in the model the step is."""
    drawn.add_scatter(
        x=x,
        y=[point.total_bytes / GIB for point in points],
        name="together",
        mode="lines",
        line={"width": 0},
        showlegend=False,
        customdata=[html.in_chart(point.moment or "") for point in points],
        hovertemplate="%{y:.2f} GiB, in %{customdata}",
    )


def _phases(points: Sequence[TimelinePoint]) -> Iterator[tuple[str, float, float]]:
    """Stretches of the step, with where each begins and ends."""
    for phase, group in groupby(points, key=lambda point: point.phase):
        own = list(group)
        if phase is not None:
            yield phase, own[0].position, own[-1].position


def _star(drawn: Figure, x: float, y: float, label: str) -> None:
    marker = {"size": 14, "symbol": "star", "color": html.PALETTE[3], "line": {"width": 1, "color": "#fff"}}
    drawn.add_scatter(x=[x], y=[y], name=label, mode="markers", marker=marker, hoverinfo="skip")


def memory_by_batch(charts: PlanCharts) -> Figure:
    drawn = html.figure()
    for colour, name, own in _curves(charts.batches):
        _curve(drawn, own, [point.device_bytes / GIB for point in own], name, colour, "%{y:.2f} GiB")
    if charts.budget_bytes is not None:
        drawn.add_hrect(y0=0, y1=charts.budget_bytes / GIB, fillcolor=_FEASIBLE, line_width=0, layer="below")
    if charts.device_bytes is not None:
        html.limit(drawn, charts.device_bytes / GIB, f"card: {format_bytes(charts.device_bytes)}")
        most = max(point.device_bytes for point in charts.batches) / GIB
        drawn.update_yaxes(range=[0, min(1.05 * max(most, charts.device_bytes / GIB), 2 * charts.device_bytes / GIB)])
    for point in charts.batches:
        if point.chosen:
            _star(drawn, point.batch, point.device_bytes / GIB, f"chosen: {point.batch}, {format_bytes(point.device_bytes)}")
    drawn.update_yaxes(title="GiB on the device", rangemode="tozero")
    return _against_batch(drawn, charts.batches)


def throughput_by_batch(charts: PlanCharts) -> Figure:
    drawn = html.figure()
    for colour, name, own in _curves(charts.batches):
        _curve(drawn, own, [point.samples_per_s for point in own], name, colour, "%{y:.4~g} samples/s")
    for point in charts.batches:
        if point.chosen and point.samples_per_s is not None:
            _star(drawn, point.batch, point.samples_per_s, f"chosen: {point.batch}, {format_rate(point.samples_per_s, 'samples')}")
    fitting = [point.batch for point in charts.batches if point.fits]
    if fitting:
        drawn.add_vrect(x0=min(fitting), x1=max(fitting), fillcolor=_FEASIBLE, line_width=0, layer="below")
    drawn.update_yaxes(title="samples/s", rangemode="tozero")
    return _against_batch(drawn, charts.batches)


def _curves(points: Sequence[BatchPoint]) -> Iterator[tuple[str, str, list[BatchPoint]]]:
    for index, (every, group) in enumerate(groupby(points, key=lambda point: point.every_n_layers)):
        yield html.PALETTE[index % len(html.PALETTE)], Checkpointing(every_n_layers=every).words, list(group)


def _curve(drawn: Figure, points: list[BatchPoint], y: Sequence[float | None], name: str, colour: str, hover: str) -> None:
    """A line, with a dot at each batch that may be chosen."""
    sizes = [7 if point.fits and point.may_be_chosen else 0 for point in points]
    style = {
        "mode": "lines+markers",
        "line": {"color": colour},
        "marker": {"size": sizes, "color": colour, "opacity": 1, "line": {"width": 0}},
    }
    drawn.add_scatter(x=[point.batch for point in points], y=list(y), name=name, hovertemplate=hover, **style)


def _against_batch(drawn: Figure, points: Sequence[BatchPoint]) -> Figure:
    largest = max(point.batch for point in points)
    ticks = [2**power for power in range(largest.bit_length())]
    every = -(-len(ticks) // 9)
    drawn.update_xaxes(title="per-device batch size", type="log", tickvals=ticks[::every], ticktext=[str(tick) for tick in ticks[::every]])
    return drawn
