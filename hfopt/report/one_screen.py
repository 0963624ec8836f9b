"""The plan on one screen, and as one small table for notebooks: verdict, assumptions, warnings, changes with reasons, speed and memory.

Every line is a (style, text) pair of at most 100 columns, so that a terminal can colour it and a file gets the bare words.
Notes about the config's own keys are on it; runners-up, rejected settings, the parts of the memory and all other notes are in
`detail_lines`, which `--verbose` adds.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import groupby

from hfopt.redact import printable
from hfopt.report import html
from hfopt.report.text import (
    FAILED,
    Line,
    assumed_words,
    at_most,
    detail_lines,
    device_words,
    outcome_words,
    place_words,
    value_words,
    wrapped,
)
from hfopt.schema import Candidate, Change, Chosen, EvaluationPeak, PlanFacts
from hfopt.units import format_bytes, format_percent, format_rate, format_seconds

SAME_SPEED = 0.005  # a gain below this is none
TOOLS = {"LLaMA-Factory": "llamafactory-cli train", "axolotl": "axolotl train", "ms-swift": "swift sft"}
PLANNED = "planned.yaml"  # what the result is called until it has a name


def plan_text(facts: PlanFacts, *, verbose: bool = False, file: str | None = None) -> str:
    """Without colours."""
    return printable("\n".join(text for _, text in plan_lines(facts, verbose=verbose, file=file)) + "\n")


def plan_lines(facts: PlanFacts, *, verbose: bool = False, file: str | None = None) -> Iterator[Line]:
    """`file` is where the YAML was written; None: it has no name yet."""
    yield from wrapped("title", f"{facts.job.model.name or facts.job.path or 'model'} on {device_words(facts)}")
    yield from wrapped("good" if facts.after.fits else "bad", verdict(facts))
    yield from wrapped("plain", batch_words(facts))
    if facts.assumed:
        yield from wrapped("plain", assumed_words(facts.assumed))
    for warning in facts.warnings:
        yield from wrapped("bad", f"WARNING: {warning}")
    yield from _engine(facts)
    yield from _changes(facts.changed_lines)
    yield from wrapped("plain", f"Speed    {_speed(facts)}", indent=9)
    yield from wrapped("plain", f"Memory   {_memory(facts)}", indent=9)
    for note in facts.about_the_file:
        yield from wrapped("plain", f"Note     {note}", indent=9)
    for item in facts.advice:
        yield from wrapped("plain", f"Advice   {item.title}" + (f": {item.flag}" if item.flag else ""), indent=9)
    yield from wrapped("good", f"Use it   {use_words(facts, file)}", indent=9)
    if verbose:
        yield from (line for style, text in detail_lines(facts) for line in wrapped(style, text, indent=10))
    elif hidden := _hidden(facts):
        yield from wrapped("soft", f"More     {hidden}: --verbose, or --html FILE for a page with charts", indent=9)


def verdict(facts: PlanFacts) -> str:
    """What came out, in one sentence."""
    planned, repaired = len(facts.changes), len(facts.changed_lines) - len(facts.changes)
    counts = ((planned, "change"), (repaired, "repair"))
    what = " and ".join(_count(count, one) for count, one in counts if count) or "nothing changed"
    before, trial = facts.before, facts.trial
    gain = facts.after.time.samples_per_s / before.time.samples_per_s
    if trial is not None and trial.outcome in FAILED:
        return f"Planned but not confirmed: the dry run on {place_words(trial)} {outcome_words(trial)}; the figures are predictions"
    if not before.runs:
        return f"The config as it is {_why_not(before)}; with {what} it runs"
    if not planned:
        fastest = "the config is already the fastest that fits"
        return f"Nothing to change: {fastest}" if not repaired else f"{_count(repaired, 'repair')} of outdated keys; otherwise {fastest}"
    if abs(gain - 1) < SAME_SPEED:
        return f"As fast as before, with {what}"
    return f"{gain:.2f} times as fast (predicted), with {what}"


def _why_not(before: Chosen) -> str:
    if before.fault is not None:
        return "cannot run"
    return "trains, but its first evaluation does not fit" if before.evaluation is not None else "does not fit"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def batch_words(facts: PlanFacts) -> str:
    """'Effective batch 64 as before: 16 × 4 → 64 × 1'."""
    was, now, world = facts.before.candidate, facts.after.candidate, facts.job.world_size
    old, new = facts.job.effective_batch, facts.effective_batch
    pairs = f"{_product(was, world)} → {_product(now, world)}" if _product(was, world) != _product(now, world) else _product(now, world)
    return f"Effective batch {new}{' as before' if old == new else f', requested instead of {old}'}: {pairs}"


def _product(candidate: Candidate, world: int) -> str:
    ranks = f" × {world}" if world > 1 else ""
    return f"{candidate.per_device_batch} × {candidate.accumulation}{ranks}"


def _engine(facts: PlanFacts) -> Iterator[Line]:
    choice = facts.engine
    if choice is not None:
        yield from wrapped("title", f"{choice.name} over {facts.job.world_size} devices: {choice.reason}")


def _changes(changes: Sequence[Change]) -> Iterator[Line]:
    """A reason that several changes share stands once, below the last of them."""
    if changes:
        yield "title", f"Changes ({len(changes)})"
    width = max((len(change.key) for change in changes), default=0)
    for reason, group in groupby(changes, key=lambda change: change.reason):
        for change in group:
            yield from wrapped("good", f"  {change.key:<{width}}  {value_words(change.before)} → {value_words(change.after)}", indent=6)
        yield from wrapped("soft", f"      {reason}", indent=6)


def _speed(facts: PlanFacts) -> str:
    before, after = facts.before, facts.after
    rate, old = (format_rate(one.time.samples_per_s, "samples") for one in (after, before))
    how = "predicted" if facts.hardware.smallest is not None else "predicted for an idle CPU"
    parts = [f"{_arrow(old.removesuffix(' samples/s'), rate)} {how}" if before.runs else f"{rate} {how} (before: {_why_not(before)})"]
    if after.time.rate_error is not None:
        parts.append(f"8 of 10 such predictions are within {round(100 * after.time.rate_error)} %")
    if facts.calibrated is not None:
        parts.append(f"at the speeds that `hfopt calibrate` measured on {facts.calibrated}")
    if facts.job.data.samples:
        parts.append(f"{at_most(facts.job.data)}{format_seconds(facts.job.data.samples / after.time.samples_per_s)} an epoch")
    found = facts.correction
    if found is not None and found.measured_step_s is not None and facts.trial is not None:
        samples = found.candidate.per_device_batch * found.candidate.accumulation
        measured = format_rate(samples / found.measured_step_s, "samples")
        parts.append(f"measured on {place_words(facts.trial)}: {measured}, {format_seconds(found.measured_step_s)} a step")
    return "; ".join(parts)


def _memory(facts: PlanFacts) -> str:
    before, after, trial = facts.before, facts.after, facts.trial
    fitted = before.fits or before.evaluation is not None
    old = format_bytes(before.memory.device_bytes) + ("" if fitted else " (DOES NOT FIT)")
    parts = [f"{_arrow(old, format_bytes(after.memory.device_bytes))} predicted, {format_bytes(facts.budget_bytes)} usable"]
    if (evaluation := _evaluation(before.evaluation, after.evaluation)) is not None:
        parts.append(evaluation)
    if trial is None:
        parts.append("not tried on a device")
    elif trial.outcome == "ok" and (held := trial.peak_device_bytes or trial.peak_reserved_bytes) is not None:
        how = "rehearsed" if trial.device == "virtual" else "measured"
        parts.append(f"{how} on {place_words(trial)}: {format_bytes(held)}")
    elif trial.outcome != "ok":
        parts.append(f"the dry run on {place_words(trial)} {outcome_words(trial)}")
    return "; ".join(parts)


def _arrow(old: str, new: str) -> str:
    """'91.5 → 208 samples/s', or one figure where nothing changes."""
    return f"{new} as before," if new == old or new.startswith(f"{old} ") else f"{old} → {new}"


def _evaluation(before: EvaluationPeak | None, after: EvaluationPeak | None) -> str | None:
    """Only where the first evaluation decides something: it did not fit, or takes more than is planned for."""
    if before is None or after is None or (before.fits and after.fits):
        return None
    old, new = (f"{format_bytes(one.memory.allocated_bytes + one.memory.context_bytes)}" for one in (before, after))
    marks = ["" if one.fits else " (DOES NOT FIT)" for one in (before, after)]
    return f"first evaluation {old}{marks[0]} → {new}{marks[1]}"


def use_words(facts: PlanFacts, file: str | None) -> str:
    """How the result is put to use: the launcher's command, the tool's, or the user's own script."""
    job, target = facts.job, file or PLANNED
    unnamed = "" if file is not None else f" (save it with -o {PLANNED})"
    if job.path is None:
        return "args = plan.apply(args), or plan.to_yaml()"
    if facts.engine is not None and facts.engine.commands:
        return facts.engine.commands[0]
    if job.tool in TOOLS:
        command = "swift rlhf" if job.tool == "ms-swift" and job.trainer != "SFT" else TOOLS[job.tool]
        return f"{command} {shlex.quote(target)}{unnamed}"
    if job.uses_trl and not job.own_script:
        return f"trl {job.trainer.lower()} --config {shlex.quote(target)}{unnamed}"
    return f"python train.py {shlex.quote(target)}{'' if target == job.path else f', instead of {job.path}'}{unnamed}"


def _hidden(facts: PlanFacts) -> str:
    others = len(facts.notes) - len(facts.about_the_file)
    counts = (
        (len(facts.alternatives), "runner-up" if len(facts.alternatives) == 1 else "runners-up"),
        (len(facts.rejected), "rejected"),
        (others, "note" if others == 1 else "notes"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)


Row = tuple[str, str, str, str]  # what, before, after, why
HEAD: Row = ("", "before", "after", "why")


def rows(facts: PlanFacts) -> Iterator[Row]:
    for change in facts.changed_lines:
        yield change.key, value_words(change.before), value_words(change.after), change.reason
    if not facts.changed_lines:
        yield "settings", "as they are", "the same", "already the fastest that fit"
    before, after = facts.before, facts.after
    yield "samples/s", _rate(before), _rate(after), "predicted"
    yield "memory", _memory_cell(before), _memory_cell(after), f"predicted; {format_bytes(facts.budget_bytes)} usable"
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


def _memory_cell(chosen: Chosen) -> str:
    return format_bytes(chosen.memory.device_bytes) + ("" if chosen.fits else " (does not fit)")
