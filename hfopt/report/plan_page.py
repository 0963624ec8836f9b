"""A plan as a page: what changes and why, memory over the step and over the batch size, and what else was tried."""

from __future__ import annotations

from hfopt.report import html, plan_charts
from hfopt.report.one_screen import verdict
from hfopt.report.text import FAILED, assumed_words, candidate_words, device_words, place_words, value_words, why_not
from hfopt.schema import PlanCharts, PlanFacts
from hfopt.units import format_bytes, format_percent, format_rate, format_seconds

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
    claimed = before.runs and bool(before.time.samples_per_s) and (facts.trial is None or facts.trial.outcome not in FAILED)
    gain = f"{after.time.samples_per_s / before.time.samples_per_s:.2f}×" if claimed else "n/a"
    trial, old = facts.trial, facts.job.effective_batch
    verified = "not tried" if trial is None else f"{_OUTCOMES[trial.outcome]} on {place_words(trial)}"
    return html.tiles(
        [
            (format_rate(after.time.samples_per_s, "samples"), "predicted throughput"),
            (
                gain,
                "against the config as it was"
                if before.runs
                else f"the config as it was {'cannot run' if before.fits else 'does not fit'}",
            ),
            (format_bytes(after.memory.device_bytes), "predicted peak device memory"),
            (format_percent(after.time.gpu_utilization), "predicted GPU utilization"),
            (
                str(facts.effective_batch),
                f"effective batch, {'before = after' if old == facts.effective_batch else f'asked for; it was {old}'}",
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
    drawn = html.chart(plan_charts.over_step(charts), label="Memory over one training step, stacked by category")
    return drawn + html.paragraph(words, css="soft")


def _by_batch(facts: PlanFacts, charts: PlanCharts) -> list[str]:
    if not charts.batches:
        return []
    words = (
        f"Predicted. Green is what the plan may use: {format_bytes(facts.budget_bytes)}, and the batches that need no more. Dots are the "
        f"batches that may be chosen: they fit and keep the effective batch of {facts.effective_batch}."
    )
    memory = html.chart(plan_charts.memory_by_batch(charts), label="Memory against the per-device batch size")
    rate = html.chart(plan_charts.throughput_by_batch(charts), label="Throughput against the per-device batch size")
    return [html.section("Memory and throughput by batch size", html.paragraph(words, css="soft"), memory, rate)]


def _others(facts: PlanFacts) -> str:
    rows = [(candidate_words(other.candidate, facts.weights_dtype), why_not(other, facts)) for other in facts.alternatives[:_MOST_OTHERS]]
    rows += [(candidate_words(other.candidate, facts.weights_dtype), other.reason) for other in facts.rejected[:_MOST_OTHERS]]
    return html.section("What else was tried", html.table(("candidate", "why not"), rows, stack=True)) if rows else ""
