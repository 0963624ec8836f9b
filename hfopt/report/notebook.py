"""The plan as one small table, for notebooks: what changes and why, speed and memory before and after."""

from __future__ import annotations

from collections.abc import Iterator

from hfopt.redact import printable
from hfopt.report import html
from hfopt.report.text import assumed_words, device_words, value_words
from hfopt.schema import Chosen, PlanFacts
from hfopt.units import format_bytes, format_percent, format_rate

Row = tuple[str, str, str, str]  # what, before, after, why
HEAD: Row = ("", "before", "after", "why")


def rows(facts: PlanFacts) -> Iterator[Row]:
    for change in facts.changed_lines:
        yield change.key, value_words(change.before), value_words(change.after), change.reason
    if not facts.changed_lines:
        yield "settings", "as they are", "the same", "already the fastest that fit"
    before, after = facts.before, facts.after
    yield "samples/s", _rate(before), _rate(after), "predicted"
    yield "memory", _memory(before), _memory(after), f"predicted; {format_bytes(facts.budget_bytes)} usable"
    yield "device busy", format_percent(before.time.gpu_utilization), format_percent(after.time.gpu_utilization), "predicted"


def plan_html(facts: PlanFacts) -> str:
    return html.paragraph(_title(facts)) + "".join(map(html.paragraph, _assumed(facts))) + html.table(HEAD, rows(facts))


def plan_markdown(facts: PlanFacts) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(_in_cell(cell) for cell in row) + " |" for row in rows(facts)]
    around = [printable(line).replace("<", "&lt;") for line in (_title(facts), *_assumed(facts))]
    return "\n\n".join((*around, "\n".join(lines))) + "\n"


def _in_cell(text: str) -> str:
    """Words of others in a Markdown table: no new row, no new column, no HTML."""
    return " ".join(printable(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _assumed(facts: PlanFacts) -> list[str]:
    return [*([assumed_words(facts.assumed)] if facts.assumed else []), *(f"Warning: {warning}" for warning in facts.warnings)]


def _title(facts: PlanFacts) -> str:
    return f"{facts.job.model.name or 'The model'} on {device_words(facts)}, effective batch {facts.effective_batch}"


def _rate(chosen: Chosen) -> str:
    return format_rate(chosen.time.samples_per_s, "samples")


def _memory(chosen: Chosen) -> str:
    return format_bytes(chosen.memory.device_bytes) + ("" if chosen.fits else " (does not fit)")
