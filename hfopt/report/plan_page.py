"""A plan as a page: what changes and why, memory over the step and over the batch size, and what else was tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfopt.report import html
from hfopt.schema import BatchPoint, Candidate, Chosen, PlanCharts, PlanFacts, TimelinePoint
from hfopt.units import GIB, format_bytes, format_percent, format_rate

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "temporaries")


def plan_page(facts: PlanFacts, charts: PlanCharts) -> bytes:
    gpu = facts.hardware.smallest
    limit_bytes = gpu.memory_bytes if gpu else facts.hardware.host.ram_bytes
    device = gpu.name if gpu else f"CPU, {facts.hardware.host.cores:g} cores"
    pieces = [html.paragraph(f"{facts.job.model.name or 'model'} on {device}", css="soft"), _summary(facts)]
    changes = [(change.key, _shown(change.before), _shown(change.after), change.reason) for change in facts.changes]
    pieces.append(
        html.section("Changes and their reasons", html.table(("key", "before", "after", "why"), changes, stack=True))
        if changes
        else html.section("Changes", html.paragraph("Nothing to change: the config is already the best one found for this device."))
    )
    if charts.timeline:
        drawn = html.chart(_timeline(charts.timeline, limit_bytes), label="Memory over one training step by category")
        pieces.append(html.section("Memory over the step", html.paragraph(_peak_words(facts.after), css="soft"), drawn))
    if charts.batches:
        drawn = html.chart(_by_batch(charts.batches, facts, limit_bytes), label="Memory and throughput against the per-device batch size")
        pieces.append(html.section("Memory and throughput by batch size", html.paragraph(_batch_words(facts), css="soft"), drawn))
    pieces.append(_others(facts))
    for advice in facts.advice:
        pieces.append(html.section(advice.title, html.paragraph(advice.detail), *([html.paragraph(advice.flag)] if advice.flag else [])))
    pieces += [html.paragraph(note, css="soft") for note in facts.notes]
    return html.page("hfopt plan", *pieces)


def _summary(facts: PlanFacts) -> str:
    before, after = facts.before, facts.after
    gain = f"{after.time.samples_per_s / before.time.samples_per_s:.2f}×" if before.fits and before.time.samples_per_s else "n/a"
    trial = facts.trial
    verified = (
        "not verified on a device"
        if trial is None
        else f"{trial.outcome} on {'the virtual GPU' if trial.device == 'virtual' else trial.device}"
    )
    return html.tiles(
        [
            (format_rate(after.time.samples_per_s, "samples"), "predicted throughput"),
            (gain, "against the config as it was" if before.fits else "the config as it was does not fit"),
            (format_bytes(after.memory.device_bytes), "predicted peak device memory"),
            (format_percent(after.time.gpu_utilization), "predicted GPU utilization"),
            (str(facts.effective_batch), "effective batch, before = after"),
            (verified, "dry run"),
        ]
    )


def _peak_words(after: Chosen) -> str:
    where = f" The peak falls in {after.memory.moment}." if after.memory.moment else ""
    return f"Predicted from a trace of the step at batch {after.candidate.per_device_batch}; allocated memory, stacked by category.{where}"


def _batch_words(facts: PlanFacts) -> str:
    return f"Predicted. The plan may use {format_bytes(facts.budget_bytes)}; a batch larger than the effective batch is no candidate."


def _timeline(points: tuple[TimelinePoint, ...], limit_bytes: int) -> Figure:
    drawn = html.figure()
    x = [100 * point.position for point in points]
    for category in CATEGORIES:
        y = [point.bytes_by_category.get(category, 0) / GIB for point in points]
        if any(y):
            drawn.add_scatter(x=x, y=y, name=category, stackgroup="memory", mode="lines", line={"width": 0.5}, hovertemplate="%{y:.2f} GiB")
    drawn.add_hline(
        y=limit_bytes / GIB, line={"dash": "dash", "color": html.PALETTE[3]}, annotation_text=f"card: {format_bytes(limit_bytes)}"
    )
    top = max(points, key=lambda point: sum(point.bytes_by_category.values()))
    drawn.add_vline(x=100 * top.position, line={"dash": "dot", "color": html.PALETTE[7]}, annotation_text="peak")
    drawn.update_xaxes(title="share of the step's allocations, %")
    drawn.update_yaxes(title="GiB", rangemode="tozero")
    return drawn


def _by_batch(points: tuple[BatchPoint, ...], facts: PlanFacts, limit_bytes: int) -> Figure:
    drawn = html.figure()
    for checkpointing in (False, True):
        own = [point for point in points if point.checkpointing == checkpointing]
        if not own:
            continue
        label = "checkpointing" if checkpointing else "no checkpointing"
        colour = html.PALETTE[1 if checkpointing else 0]
        x = [point.batch for point in own]
        drawn.add_scatter(
            x=x, y=[p.device_bytes / GIB for p in own], name=f"memory, {label}", line={"color": colour}, hovertemplate="%{y:.2f} GiB"
        )
        drawn.add_scatter(
            x=x,
            y=[p.samples_per_s for p in own],
            name=f"samples/s, {label}",
            line={"color": colour, "dash": "dot"},
            yaxis="y2",
            hovertemplate="%{y:.1f}/s",
        )
    after = facts.after
    drawn.add_scatter(
        x=[after.candidate.per_device_batch],
        y=[after.memory.device_bytes / GIB],
        name="chosen",
        mode="markers",
        marker={"size": 13, "symbol": "star", "color": html.PALETTE[2]},
    )
    drawn.add_hrect(y0=0, y1=facts.budget_bytes / GIB, fillcolor=html.PALETTE[2], opacity=0.08, line_width=0)
    drawn.add_hline(
        y=limit_bytes / GIB, line={"dash": "dash", "color": html.PALETTE[3]}, annotation_text=f"card: {format_bytes(limit_bytes)}"
    )
    drawn.update_xaxes(title="per-device batch size", type="log", dtick=0.30103)
    drawn.update_yaxes(title="GiB", rangemode="tozero")
    drawn.update_layout(
        yaxis2={"overlaying": "y", "side": "right", "title": "samples/s", "rangemode": "tozero", "showgrid": False}, margin={"r": 64}
    )
    return drawn


def _others(facts: PlanFacts) -> str:
    rows = [
        (
            _words(other.candidate),
            format_bytes(other.memory.device_bytes),
            format_rate(other.time.samples_per_s, "samples"),
            "slower or equal",
        )
        for other in facts.alternatives[:8]
    ]
    rows += [(_words(other.candidate), "", "", other.reason) for other in facts.rejected[:8]]
    return (
        html.section("What else was tried", html.table(("candidate", "memory", "throughput", "why not"), rows, stack=True)) if rows else ""
    )


def _words(candidate: Candidate) -> str:
    checkpointing = ", checkpointing" if candidate.checkpointing.on else ""
    return f"{candidate.per_device_batch} × {candidate.accumulation}, {candidate.precision}{checkpointing}"


def _shown(value: object) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
