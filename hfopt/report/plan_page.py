"""A plan as a page: what changes and why, charts of memory over the step and over the batch size, and what else was tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from hfopt.report import html
from hfopt.report.one_screen import verdict
from hfopt.report.text import assumed_words, candidate_words, device_words, place_words, value_words, why_not
from hfopt.schema import BatchPoint, Checkpointing, PlanCharts, PlanFacts, TimelinePoint
from hfopt.units import GIB, format_bytes, format_percent, format_rate, format_seconds

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


_MOST_OTHERS = 8
_OUTCOMES = {"ok": "ran", "oom": "out of memory", "error": "failed", "timeout": "out of time"}


def plan_page(facts: PlanFacts, charts: PlanCharts) -> bytes:
    pieces = [html.paragraph(f"{facts.job.model.name or 'model'} on {device_words(facts)}", css="soft"), _overview(facts, charts)]
    pieces.append(_summary(facts))
    pieces += [html.paragraph(assumed_words(facts.assumed))] if facts.assumed else []
    reasons = [(change.key, change.reason) for change in facts.changed_lines]
    pieces += [html.section("Why these changes", html.table(("key", "reason"), reasons, stack=True))] if reasons else []
    pieces += [_engine(facts), _tried(facts), *_by_batch(facts, charts), _others(facts)]
    for advice in facts.advice:
        pieces.append(html.section(advice.title, html.paragraph(advice.detail), *([html.code(advice.flag)] if advice.flag else [])))
    pieces += [html.section("Notes", *(html.paragraph(note, css="soft") for note in facts.notes))] if facts.notes else []
    return html.page("hfopt plan", *pieces)


def _overview(facts: PlanFacts, charts: PlanCharts) -> str:
    """The verdict, what changes, and the memory of a step beside it."""
    changes = [(change.key, f"{value_words(change.before)} → {value_words(change.after)}") for change in facts.changed_lines]
    warnings = "".join(html.paragraph(f"Warning: {warning}", css="warning") for warning in facts.warnings)
    left = html.paragraph(verdict(facts), css="verdict") + warnings + (html.pairs(changes) if changes else "")
    return html.overview(left, _over_step(facts, charts))


def _summary(facts: PlanFacts) -> str:
    before, after = facts.before, facts.after
    was = "the config as it was does not fit" if not before.fits else "the config as it was cannot run"
    if before.runs and before.time.samples_per_s:
        was = f"{format_rate(before.time.samples_per_s, 'samples')} before"
    trial, old = facts.trial, facts.job.effective_batch
    verified = "not tried" if trial is None else f"{_OUTCOMES[trial.outcome]} on {place_words(trial)}"
    return html.tiles(
        [
            (format_rate(after.time.samples_per_s, "samples"), f"predicted throughput; {was}"),
            (format_bytes(after.memory.device_bytes), "predicted peak device memory"),
            (format_percent(after.time.gpu_utilization), "predicted GPU utilization"),
            (
                str(facts.effective_batch),
                f"effective batch, {'before = after' if old == facts.effective_batch else f'requested; it was {old}'}",
            ),
            (verified, "dry run"),
        ]
    )


def _engine(facts: PlanFacts) -> str:
    """How several devices share the work, and how to start it."""
    choice = facts.engine
    if choice is None:
        return ""
    commands = [html.code(command) for command in choice.commands]
    others = html.table(("engine", "why not"), choice.rejected, stack=True) if choice.rejected else ""
    return html.section(f"{choice.name} over {facts.job.world_size} devices", html.paragraph(choice.reason), *commands, others)


def _tried(facts: PlanFacts) -> str:
    found, trial = facts.correction, facts.trial
    if found is None or trial is None:
        return ""
    rows = []
    if found.predicted_reserved_bytes is not None and found.measured_reserved_bytes is not None:
        sizes = (format_bytes(found.predicted_reserved_bytes), format_bytes(found.measured_reserved_bytes))
        rows.append(("reserved memory", *sizes, _off(found.memory_error)))
    if found.predicted_step_s is not None and found.measured_step_s is not None:
        times = (format_seconds(found.predicted_step_s), format_seconds(found.measured_step_s))
        rows.append(("a step", *times, _off(found.time_error)))
    how = "rehearsed" if trial.device == "virtual" else "measured"
    where = f"{candidate_words(found.candidate, facts.weights_dtype)}, {how} on {place_words(trial)}."
    table = html.table(("", "predicted", how, "prediction off by"), rows)
    return html.section(f"Predicted and {how}", html.paragraph(where, css="soft"), table) if rows else ""


def _off(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _over_step(facts: PlanFacts, charts: PlanCharts) -> str:
    if not charts.timeline:
        return ""
    after = facts.after
    where = f" The peak falls in {charts.peak.moment}." if charts.peak is not None and charts.peak.moment else ""
    cached = f" With what the allocator keeps unused, {format_bytes(after.memory.device_bytes)} are taken at most."
    words = f"Allocated memory of one step at batch {after.candidate.per_device_batch}, predicted from its trace.{where}{cached}"
    drawn = html.chart(over_step(charts), label="Memory over one training step, stacked by category")
    return drawn + html.paragraph(words, css="soft")


def _by_batch(facts: PlanFacts, charts: PlanCharts) -> list[str]:
    if not charts.batches:
        return []
    words = (
        f"Predicted. Green is what the plan may use: {format_bytes(facts.budget_bytes)}, and the batches that need no more. Dots are the "
        f"batches that may be chosen: they fit and keep the effective batch of {facts.effective_batch}."
    )
    memory = html.chart(memory_by_batch(charts), label="Memory against the per-device batch size")
    rate = html.chart(throughput_by_batch(charts), label="Throughput against the per-device batch size")
    return [html.section("Memory and throughput by batch size", html.paragraph(words, css="soft"), memory, rate)]


def _others(facts: PlanFacts) -> str:
    rows = [(candidate_words(other.candidate, facts.weights_dtype), why_not(other, facts)) for other in facts.alternatives[:_MOST_OTHERS]]
    rows += [(candidate_words(other.candidate, facts.weights_dtype), other.reason) for other in facts.rejected[:_MOST_OTHERS]]
    return html.section("What else was tried", html.table(("candidate", "why not"), rows, stack=True)) if rows else ""
