"""A run as a page: how fast, where the time went, the machine over time, and each finding where it began; or two runs, before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hfopt.report import html, run_charts
from hfopt.schema import RunDifference, RunView
from hfopt.units import format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


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
        (run_charts.mark_name(number if several else None, place), f"step {mark.step}", mark.title, mark.words)
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
        _chart("Utilization", run_charts.utilization(runs), "Utilization over time"),
        _chart("Memory", run_charts.memory(runs), "Memory over time"),
    ]
    if len(runs) == 1:  # the wait for data is a part of it
        pieces.append(_chart("Where the time went", run_charts.where_time_went(runs[0]), "Shares of the time over the run"))
    else:
        pieces.append(_chart("Data wait", run_charts.data_wait(runs), "Share of the training time spent waiting for data"))
    if any(run_charts.has(run, run_charts.POWER) for run in runs):
        pieces.append(_chart("Power", run_charts.power(runs), "Power over time"))
    pieces.append(_chart("Throughput", run_charts.throughput(runs), "Samples per second over time"))
    return pieces


def _chart(title: str, drawn: Figure, label: str) -> str:
    return html.section(title, html.chart(drawn, label=label))
