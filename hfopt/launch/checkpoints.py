"""The checkpoint to resume from: the newest one of an output folder that was written to its end."""

from __future__ import annotations

import json
import re
from pathlib import Path

_NAME = re.compile(r"^checkpoint-(\d+)$")


def last_checkpoint(output_dir: Path) -> Path | None:
    """A process killed while saving leaves a folder without a readable state: it is passed over."""
    if not output_dir.is_dir():
        return None
    numbered = [(int(match[1]), entry) for entry in output_dir.iterdir() if (match := _NAME.match(entry.name)) and entry.is_dir()]
    return next((entry for _, entry in sorted(numbered, reverse=True) if _complete(entry)), None)


def _complete(folder: Path) -> bool:
    """The Trainer writes weights, optimizer, generators and then the state, so a whole state means a whole checkpoint."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state
