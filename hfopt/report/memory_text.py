"""The memory of a step in words: a table by batch size and checkpointing, where the bytes are, and whether it fits."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from hfopt.report.text import assumed_lines, evaluation_words
from hfopt.schema import Breakdown, MemoryRow, MemoryTable
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
        return "no card: name one with --gpu or --vram to hear what fits"
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
