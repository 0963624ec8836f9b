"""What a Trainer subclass counts for itself while it computes a loss, put back before a step is repeated.

A subclass may count in `compute_loss` (TRL's SFTTrainer: tokens seen, entropy, accuracy). A repeated step would count twice, so the plain
values it keeps on itself (numbers, strings, and dicts and lists of them) are noted before each micro-batch and restored before the
repetition. What the Trainer itself keeps is changed between micro-batches only, never within one, and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

Snapshot = dict[str, Any]
_PLAIN = (int, float, str, bool, type(None))


class Counters:
    def __init__(self, trainer: Any) -> None:
        from transformers import Trainer

        kind = type(trainer)
        stock = kind.compute_loss is Trainer.compute_loss and kind.training_step is Trainer.training_step
        self._trainer = trainer
        self._names: tuple[str, ...] | None = () if stock else None
        self._not_ours = frozenset(name for value in vars(Trainer).values() for name in _attribute_names(value))

    def snapshot(self) -> Snapshot:
        if self._names == ():
            return {}
        own = vars(self._trainer)
        names = [name for name, value in own.items() if name not in self._not_ours and _is_plain(value)]
        return {name: _copied(own[name]) for name in names}

    def restore(self, snapshot: Snapshot) -> None:
        for name, value in snapshot.items():
            setattr(self._trainer, name, _put_back(getattr(self._trainer, name), value))

    def merge_pieces(self, snapshot: Snapshot, weights: Sequence[float]) -> None:
        """Lists that got one entry per piece get one entry for the micro-batch: the pieces' mean, weighted."""
        for name, before in snapshot.items():
            _merged(getattr(self._trainer, name), before, weights)


def _attribute_names(value: Any) -> tuple[str, ...]:
    function = getattr(value, "__wrapped__", value)
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


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
