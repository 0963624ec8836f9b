"""What a Trainer subclass counts for itself while it computes a loss, put back before a step is repeated.

A subclass may count in `compute_loss` (TRL's SFTTrainer: tokens seen, entropy, accuracy). A repeated step would count twice, so the plain
values it keeps on itself (numbers, strings, and dicts and lists of them) are noted before each micro-batch and restored before the
repetition. The Trainer itself counts between micro-batches only, so nothing of its own is set back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Snapshot = dict[str, Any]
_PLAIN = (int, float, str, bool, type(None))


class Counters:
    def __init__(self, trainer: Any) -> None:
        from transformers import Trainer

        kind = type(trainer)
        self._trainer = trainer
        self.custom = kind.compute_loss is not Trainer.compute_loss or kind.training_step is not Trainer.training_step

    def snapshot(self) -> Snapshot:
        if not self.custom:
            return {}
        return {name: _copied(value) for name, value in vars(self._trainer).items() if _is_plain(value)}

    def restore(self, snapshot: Snapshot) -> None:
        for name, value in snapshot.items():
            setattr(self._trainer, name, _put_back(getattr(self._trainer, name), value))

    def merge_pieces(self, snapshot: Snapshot, weights: Sequence[float]) -> None:
        """Lists that got one entry per piece get one entry for the micro-batch: the pieces' mean, weighted."""
        for name, before in snapshot.items():
            _merged(getattr(self._trainer, name), before, weights)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(inner) for inner in value.values())
    if isinstance(value, list):
        return not value or _is_plain(value[0])
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value] if value and isinstance(value[0], dict | list) else value[:]
    return value


def _put_back(now: Any, before: Any) -> Any:
    """The earlier value, in the container that is there now, which others may hold."""
    if isinstance(before, dict) and isinstance(now, dict):
        restored = {key: _put_back(now.get(key), inner) for key, inner in before.items()}
        now.clear()
        now.update(restored)
        return now
    if isinstance(before, list) and isinstance(now, list):
        now[:] = _copied(before)
        return now
    return before


def _merged(now: Any, before: Any, weights: Sequence[float]) -> None:
    if isinstance(now, dict):
        for key, inner in now.items():
            _merged(inner, before.get(key, []) if isinstance(before, dict) else [], weights)
    elif isinstance(now, list) and isinstance(before, list) and len(now) - len(before) == len(weights) > 1:
        added = now[len(before) :]
        if all(isinstance(entry, int | float) for entry in added):
            now[len(before) :] = [sum(entry * weight for entry, weight in zip(added, weights, strict=True)) / sum(weights)]
