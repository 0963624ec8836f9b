"""What a fallback leaves behind: one line for the user, an entry in the run's log, and settings to start from next time."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hfopt.files import write_whole
from hfopt.redact import said
from hfopt.schema import NextSettings, OomSeen, ReplanStep, RunFailure
from hfopt.units import format_bytes

Sink = Callable[[Mapping[str, Any]], None]
"""Takes one entry of the run's log."""
Settings = Callable[[Mapping[str, Any], str], None]
"""Takes the settings to start from next time, and why; the CLI puts them into the user's own YAML."""


class Supervisor(Protocol):
    """Who starts the run again when a process of it cannot go on."""

    def goes_on_with(self, settings: NextSettings) -> None: ...

    def failed(self, failure: RunFailure) -> None: ...


REPLANNED = "config_replanned.yaml"

_DID: dict[str, str] = {
    "retry_after_clearing": "the step runs again after clearing the cache",
    "chunk": "the step runs again in pieces of {size}",
    "checkpointing": "the step runs again with gradient checkpointing, {size} at a time",
    "restart": "this process cannot go on; resume from the last checkpoint with {size} × {accumulation}{checkpointing}",
    "give_up": "nothing is left to try; what would fit: {smallest}",
}


def sentence(seen: OomSeen, step: ReplanStep, effective_batch: int, note: str | None = None) -> str:
    """'hfopt: out of memory at step 7 (forward, 16 samples of 512 tokens): the step runs again in pieces of 8; effective batch still 64'"""
    samples = f"{seen.micro_batch} sample{'s' if seen.micro_batch != 1 else ''}" + (f" of {seen.length} tokens" if seen.length else "")
    asked = f", {format_bytes(seen.requested_bytes)} more asked for" if seen.requested_bytes else ""
    size = step.candidate.per_device_batch if step.candidate else None
    accumulation = step.candidate.accumulation if step.candidate else None
    checkpointing = " and gradient checkpointing" if step.candidate and step.candidate.checkpointing.on else ""
    did = _DID[step.action].format(size=size, accumulation=accumulation, checkpointing=checkpointing, smallest=step.smallest_change)
    kept = "" if step.action == "give_up" else f"; effective batch still {effective_batch}"
    return f"hfopt: out of memory at step {seen.step} ({seen.phase}, {samples}{asked}): {did}{kept}" + (f" ({note})" if note else "")


def tell(line: str) -> None:
    sys.stderr.write(f"{said(line)}\n")
    sys.stderr.flush()


def entry(seen: OomSeen, step: ReplanStep, effective_batch: int) -> dict[str, Any]:
    """The log's entry, plain data."""
    return {"seen": asdict(seen), "step": asdict(step), "effective_batch": effective_batch}


def write_settings(folder: Path, changes: Mapping[str, Any], why: str) -> None:
    """The settings that went through, as a small YAML beside the run's own output."""
    lines = [f"# {why}", *(f"{key}: {json.dumps(value)}" for key, value in changes.items())]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / REPLANNED, "\n".join(lines) + "\n")
