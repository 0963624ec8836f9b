"""An explanation of an out-of-memory error in words: what was asked for, why it failed, where, and what would have fitted."""

from __future__ import annotations

from collections.abc import Iterator

from hfopt.schema import Explanation, FittingChange, ReplayedOom
from hfopt.units import format_bytes

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
        priced = made.replay is not None
        yield "title", "What would have fitted, smallest change first (predicted)" if priced else "What helps"
        yield from (("plain", f"  - {_words(change)}") for change in made.changes)
    if made.replay is None and report.cause in ("device_full", "fragmentation", "one_request", "library", "communication"):
        yield "soft", "with --config FILE the step is replayed, and each change has its figure"
    if made.notes:
        yield "title", "Notes"
        yield from (("soft", f"  {note}") for note in made.notes)


def _replayed(replay: ReplayedOom) -> Iterator[tuple[str, str]]:
    needs = f"{format_bytes(replay.needed_bytes)} at batch {replay.batch}"
    yield "title", f"By the replay of the config on {replay.device} (predicted, not measured)"
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in replay.breakdown.items())
    if replay.fits:
        yield "plain", f"  the step takes {needs} and fits {format_bytes(replay.available_bytes)}: what failed is not in this config's step"
        yield "plain", f"  its peak is in {replay.moment}"
    else:
        asked = "" if replay.failed_bytes is None else f", asking for {format_bytes(replay.failed_bytes)}"
        yield (
            "plain",
            f"  the step takes {needs}, {format_bytes(replay.available_bytes)} were to be had: it runs out in {replay.moment}{asked}",
        )
    if parts:
        yield "plain", f"  {parts}"
    if replay.matches:
        yield "plain", f"  a tensor of the size in the message is made in: {'; '.join(replay.matches)}"


def _words(change: FittingChange) -> str:
    figure = "" if change.device_bytes is None else f": about {format_bytes(change.device_bytes)}"
    return f"{change.what}{figure}{_EFFECTS.get(change.effect, '')}: {change.how}"
