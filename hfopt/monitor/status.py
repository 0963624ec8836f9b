"""One line that says how the machine is doing, and where to show it: the Trainer's progress bar, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hfopt.schema import Sample
from hfopt.units import GIB


def status_line(sample: Sample, data_wait_share: float | None) -> str:
    """GPU: 85% | VRAM: 12.3/24.0GiB (51.2%) | CPU: 45.2% | RAM: 18.4/64.0GiB (28.8%) | data wait 3% ; what is unknown is left out."""
    parts: list[str] = []
    utils = [gpu.sm_util for gpu in sample.gpus if gpu.sm_util is not None and "sm_util" not in gpu.suspect]
    if utils:
        parts.append(f"GPU: {100 * sum(utils) / len(utils):.0f}%")
    memory = [(gpu.used_bytes, gpu.total_bytes) for gpu in sample.gpus if gpu.used_bytes is not None and gpu.total_bytes]
    if memory:
        parts.append(f"VRAM: {_of(sum(used for used, _ in memory), sum(total for _, total in memory))}")
    if sample.cpu_util is not None:
        parts.append(f"CPU: {100 * sample.cpu_util:.1f}%")
    if sample.ram_used_bytes is not None and sample.ram_total_bytes:
        parts.append(f"RAM: {_of(sample.ram_used_bytes, sample.ram_total_bytes)}")
    if data_wait_share is not None:
        parts.append(f"data wait {100 * data_wait_share:.0f}%")
    return " | ".join(parts)


def _of(used: int, total: int) -> str:
    percent = round(100 * used / total, 4)  # a byte below 28.75 % is not 28.7 %
    return f"{used / GIB:.1f}/{total / GIB:.1f}GiB ({percent:.1f}%)"


def show(callbacks: Sequence[Any], text: str) -> None:
    """On the bar of ProgressCallback (drawn with its next refresh) or before the one of NotebookProgressCallback."""
    for callback in callbacks:
        if (bar := getattr(callback, "training_bar", None)) is not None and hasattr(bar, "set_postfix_str"):
            bar.set_postfix_str(text, refresh=False)
        elif (tracker := getattr(callback, "training_tracker", None)) is not None:
            tracker.prefix = text


def say(callbacks: Sequence[Any], text: str) -> None:
    """A line for people on stderr; above the bar if there is one, so that neither breaks the other."""
    for callback in callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None and hasattr(bar, "write"):
            bar.write(text, file=sys.stderr)
            return
    sys.stderr.write(f"{text}\n")
