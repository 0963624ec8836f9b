"""Which checkpoint a run can be resumed from: the newest that is whole, and why newer ones were passed over.

A process that was killed, or a disk that was full, leaves folders that look like checkpoints. Resuming from weights alone would start the
optimizer anew and train something else without a word, so a checkpoint without its optimizer counts as none. Files are not loaded: a
.safetensors file states its size in its head, a .pt file is a zip archive whose directory stands at its end.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"^checkpoint-(\d+)$")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARDED = ("pytorch_model_fsdp*", "global_step*", "optimizer_*", "optimizer.bin")
"""What FSDP and DeepSpeed write in place of weights and optimizer; how whole it is only they can tell."""
_HEAD_BYTES = 8  # of a .safetensors file: the length of its header, little-endian
_LONGEST_HEAD = 100_000_000  # as the format's own reader allows


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """`path` is None where there is none to resume from; `passed_over` names newer ones, each with what is wrong with it."""

    path: Path | None
    passed_over: tuple[str, ...] = ()


def newest_whole(output_dir: Path) -> Checkpoint:
    """A folder that cannot be read holds none."""
    try:
        numbered = [(int(match[1]), entry) for entry in output_dir.iterdir() if (match := _NAME.match(entry.name)) and entry.is_dir()]
    except OSError:
        return Checkpoint(path=None)
    passed_over: list[str] = []
    for _, folder in sorted(numbered, reverse=True):
        wrong = what_is_wrong(folder)
        if wrong is None:
            return Checkpoint(path=folder, passed_over=tuple(passed_over))
        passed_over.append(f"{folder.name}: {wrong}")
    return Checkpoint(path=None, passed_over=tuple(passed_over))


def what_is_wrong(folder: Path) -> str | None:
    """One thing that keeps a run from being resumed from here exactly; None: nothing was found."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text())
    except (OSError, ValueError):
        return "trainer_state.json is missing or cut short"
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return "trainer_state.json names no step"
    try:
        if any(entry for pattern in _SHARDED for entry in folder.glob(pattern)):
            return None
        return _weights(folder) or _archive(folder / "optimizer.pt") or _archive(folder / "scheduler.pt")
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _weights(folder: Path) -> str | None:
    for name in _INDEXES:
        if (folder / name).exists():
            try:
                shards = sorted(set(json.loads((folder / name).read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError):
                return f"{name} is cut short"
            return next((wrong for shard in shards if (wrong := _file(folder / shard))), None)
    found = [folder / name for name in _WEIGHTS if (folder / name).exists()]
    return "it has no weights" if not found else next((wrong for path in found if (wrong := _file(path))), None)


def _file(path: Path) -> str | None:
    return _safetensors(path) if path.suffix == ".safetensors" else _archive(path)


def _safetensors(path: Path) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    with path.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
        length = struct.unpack("<Q", head)[0] if len(head) == _HEAD_BYTES else _LONGEST_HEAD + 1
        try:
            tensors: Any = json.loads(stream.read(length)) if length <= _LONGEST_HEAD else None
            end = max((tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return f"{path.name} is cut short"
    return None if path.stat().st_size == _HEAD_BYTES + length + end else f"{path.name} is cut short"


def _archive(path: Path) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    return None if zipfile.is_zipfile(path) else f"{path.name} is cut short or empty"
