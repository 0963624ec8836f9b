"""Memory in words: a table by batch size and checkpointing, where the bytes are, whether it fits, and why it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from hfopt.report.text import assumed_lines, evaluation_words
from hfopt.schema import Breakdown, Explanation, FittingChange, MemoryRow, MemoryTable, ReplayedOom
from hfopt.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console


_WHAT = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations",
    "logits_bytes": "logits and loss",
    "temporaries_bytes": "temporaries",
    "fragmentation_bytes": "allocator's unused cache",
    "context_bytes": "CUDA context",
}

CLOSE_SHARE = 0.02
CLOSE_WORDS = "6 of 84 runs that others measured took over 2 % more than estimated"
"""benchmarks/memory_accuracy.py, every batch at its full length."""


def print_memory(console: Console, table: MemoryTable) -> None:
    """Everything about the table, for people."""
    console.print(_heading(table))
    for line in assumed_lines(table.assumed):
        console.print(line)
    console.print(_device(table))
    console.print(_step(table))
    console.print()
    _print_rows(console, table)
    asked = next((row for row in table.rows if row.asked), None)
    if asked is not None:
        _print_breakdown(console, asked)
    console.print()
    for line in verdict(table):
        console.print(line)
    if table.evaluation is not None:
        console.print(evaluation_words(table.evaluation))
    for note in table.notes:
        console.print(f"note: {note}")


def verdict(table: MemoryTable) -> list[str]:
    """'batch 8 fits with 512 MiB to spare', and the largest batch with and without checkpointing."""
    lines = []
    asked = next((row for row in table.rows if row.asked), None)
    if asked is not None and asked.fits is not None and asked.spare_bytes is not None:
        how = "is too close to call:" if _is_close(asked) else "fits with" if asked.fits else "does not fit:"
        rest = "to spare" if asked.fits else "missing"
        lines.append(f"batch {asked.peak.batch}{_with(asked)} {how} {format_bytes(abs(asked.spare_bytes))} {rest}")
    if any(_is_close(row) for row in table.rows):
        lines.append(f"too close to call: {CLOSE_WORDS}")
    for checkpointing, largest in table.largest.items():
        with_it = "with" if checkpointing else "without"
        if table.available_bytes is not None:
            size = "not even 1 fits" if largest is None else f"{largest}"
            lines.append(f"largest batch {with_it} gradient checkpointing: {size}")
    return lines


def _heading(table: MemoryTable) -> str:
    trained = f", {table.trainable_parameters:,} trained" if table.trainable_parameters != table.parameters else ""
    return f"{table.model} ({table.model_class}): {table.parameters:,} parameters{trained}"


def _device(table: MemoryTable) -> str:
    if table.device is None or table.available_bytes is None:
        return "no card: name one with --gpu or --vram to see what fits"
    return f"{table.device.name}: {format_bytes(table.available_bytes)} {'free' if table.device.free_bytes else 'usable'}"


def _step(table: MemoryTable) -> str:
    settings = table.settings
    parts = [settings.precision, settings.optim, f"accumulation {settings.accumulation}", *([table.sample] if table.sample else [])]
    return f"one step: {', '.join(parts)}; predicted from a trace of {table.seconds:.1f} s"


def _print_rows(console: Console, table: MemoryTable) -> None:
    console.print(f"{'batch':>8} {'checkpointing':>15} {'allocated':>12} {'reserved':>12} {'on the card':>12}  verdict")
    for row in table.rows:
        peak = row.peak
        sizes = "".join(f" {format_bytes(size):>12}" for size in (peak.allocated_bytes, peak.reserved_bytes, peak.device_bytes))
        mark = "*" if row.asked else " "
        line = f"{mark}{peak.batch:>7} {'yes' if row.checkpointing.on else 'no':>15}{sizes}  {_row_verdict(row)}"
        console.print(line.rstrip(), style="bold" if row.asked else None)
    if any(row.asked for row in table.rows):
        console.print("* as the config has it")


def _row_verdict(row: MemoryRow) -> str:
    if row.fits is None or row.spare_bytes is None:
        return ""
    rest = f"{format_bytes(abs(row.spare_bytes))} {'to spare' if row.fits else 'missing'}"
    return f"{'too close to call' if _is_close(row) else 'fits' if row.fits else 'does not fit'}, {rest}"


def _is_close(row: MemoryRow) -> bool:
    """Is the margin smaller than what estimates are known to be off by?"""
    return row.spare_bytes is not None and abs(row.spare_bytes) < CLOSE_SHARE * row.peak.device_bytes


def _print_breakdown(console: Console, row: MemoryRow) -> None:
    breakdown = row.peak.breakdown
    if breakdown is None:
        return
    console.print()
    console.print(f"where the {format_bytes(breakdown.total_bytes)} of batch {row.peak.batch}{_with(row)} are:")
    for field in fields(Breakdown):
        size = getattr(breakdown, field.name)
        if size:
            console.print(f"  {_WHAT[field.name]:<25}{format_bytes(size):>12}  {100 * size / breakdown.total_bytes:5.1f} %")
    if row.peak.moment:
        console.print(f"the peak is in: {row.peak.moment}")


def _with(row: MemoryRow) -> str:
    return " with checkpointing" if row.checkpointing.on else ""


_EFFECTS = {
    "same": "",
    "rounding": " (rounds the optimizer's states)",
    "hardware": " (takes the host's memory or other cards)",
    "training": " (trains something else)",
}


def explanation_lines(made: Explanation) -> Iterator[tuple[str, str]]:
    """Style and text of each line."""
    report = made.report
    yield "plain", f"line {report.line}: {report.text}"
    for number, reason in enumerate(made.reasons):
        yield "title" if number == 0 else "plain", reason
    if made.replay is not None:
        yield from _replayed(made.replay)
    if made.changes:
        yield "title", _changes_heading(made.replay)
        yield from (("plain", f"  - {_words(change)}") for change in made.changes)
    if made.replay is None and report.cause in ("device_full", "fragmentation", "one_request", "library", "communication"):
        yield "soft", "with --config FILE the step is replayed, and each change has its figure"
    if made.notes:
        yield "title", "Notes"
        yield from (("soft", f"  {note}") for note in made.notes)


def _changes_heading(replay: ReplayedOom | None) -> str:
    if replay is None:
        return "What helps"
    what = "What would lower this config's step" if replay.fits else "What would have fitted"
    return f"{what}, smallest change first (predicted)"


def _replayed(replay: ReplayedOom) -> Iterator[tuple[str, str]]:
    needs = f"{format_bytes(replay.needed_bytes)} at batch {replay.batch}"
    yield "title", f"By the replay of the config on {replay.device} (predicted, not measured)"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in replay.breakdown.items())
    if replay.fits:
        yield "plain", f"  the step takes {needs} and fits {format_bytes(replay.available_bytes)}: it does not explain the error"
        yield (
            "plain",
            "  likely causes: longer samples than assumed, another config than the run's, a leak, or a second model on the card",
        )
        yield "plain", f"  its peak is in {replay.moment}"
    else:
        asked = "" if replay.failed_bytes is None else f", requesting {format_bytes(replay.failed_bytes)}"
        yield (
            "plain",
            f"  the step needs {needs}, {format_bytes(replay.available_bytes)} was available: it runs out in {replay.moment}{asked}",
        )
    if parts:
        yield "plain", f"  {parts}"
    if replay.matches:
        yield "plain", f"  a tensor of the size in the message is made in: {'; '.join(replay.matches)}"


def _words(change: FittingChange) -> str:
    figure = "" if change.device_bytes is None else f": about {format_bytes(change.device_bytes)}"
    return f"{change.what}{figure}{_EFFECTS.get(change.effect, '')}: {change.how}"
