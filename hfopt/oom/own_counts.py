"""What a Trainer subclass counts for itself while it computes a loss, put back before a step is repeated.

A subclass may count in `compute_loss` (TRL's SFTTrainer: tokens seen, entropy, accuracy). A repeated step would count twice, so the plain
values it keeps on itself (numbers, strings, and dicts and lists of them) are noted before each micro-batch and restored before the
repetition. The Trainer itself counts between micro-batches only, so nothing of its own is set back.

Pieces count once each. Whether that adds up is learned from two samples, together and alone, each from the same counts: a number of samples
or tokens adds up, and so does a list that gets a mean per call; a number of calls moves alike whatever the size, so each piece begins with
what the micro-batch began with. Anything else is refused. What TRL counts is trusted: its lists hold means that are only logged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch

from hfopt.oom.kept_state import Covered, own_names
from hfopt.oom.replay import PLAIN
from hfopt.oom.step_down import Refusal

Snapshot = dict[str, Any]
How = Literal["each_call", "adds_up", "otherwise"]
_SMALL = 4096  # numbers in a tensor that a subclass may keep for itself: a mean, a histogram
_NOT_COUNTED = frozenset({"train_dataset", "eval_dataset", "data_collator", "processing_class", "callback_handler", "model_init"})
_LIBRARIES = frozenset({"builtins", "torch", "transformers", "accelerate", "peft", "datasets", "tokenizers", "hfopt", "collections"})
_NO_STATE = (torch.nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset, torch.utils.data.DataLoader)


class Counters:
    def __init__(self, trainer: Any) -> None:
        from transformers import Trainer

        kind = type(trainer)
        self._trainer = trainer
        self.custom = kind.compute_loss is not Trainer.compute_loss or kind.training_step is not Trainer.training_step
        subclasses = [base for base in kind.__mro__ if issubclass(base, Trainer) and base is not Trainer]
        self._defaults = {name for base in subclasses for name, value in vars(base).items() if type(value) in PLAIN and name[:2] != "__"}

        self.learned: dict[str, How] = {}  # of the script's own names

    def snapshot(self) -> Snapshot:
        if not self.custom:
            return {}
        state = self._trainer.state  # the Trainer counts its tokens between micro-batches, TRL's that generate within them
        tokens = {"state": _Held(what=state, values={"num_input_tokens_seen": state.num_input_tokens_seen})}
        return {name: _copied(value) for name, value in self._kept() if _is_plain(value)} | tokens

    def _kept(self) -> Iterator[tuple[str, Any]]:
        """What it has now, and what its class gives it until it sets its own."""
        own = vars(self._trainer)
        yield from ((name, value) for name, value in own.items() if name not in _NOT_COUNTED)
        yield from ((name, getattr(self._trainer, name)) for name in self._defaults if name not in own)

    def restore(self, snapshot: Snapshot) -> None:
        for name, value in snapshot.items():
            before = _put_back(getattr(self._trainer, name), value)
            if getattr(self._trainer, name) is not before:
                setattr(self._trainer, name, before)

    def covered(self) -> Covered:
        """What `restore` puts back."""
        found: Covered = set()
        for name, value in self._kept() if self.custom else ():
            if _is_plain(value):
                found.add((id(self._trainer), name))
                _cover(value, found)
        return found

    def learn(self, before: Snapshot, pair: Snapshot, alone: Sequence[Snapshot], weights: Sequence[float], tolerance: float) -> None:
        """From the counts after two samples together, and after each alone."""
        for name in self._own_and_moved(before, pair) | self._own_and_moved(before, alone[0]) | self._own_and_moved(before, alone[1]):
            start, two, *ones = (_shown(state.get(name)) for state in (before, pair, *alone))
            if two == ones[0] == ones[1]:
                self.learned[name] = "each_call"
            else:
                self.learned[name] = "adds_up" if _adds_up(start, two, ones, weights, tolerance) else "otherwise"

    def _own_and_moved(self, before: Snapshot, now: Snapshot) -> set[str]:
        own = own_names(self._trainer) if self.custom else frozenset()
        return {name for name in now if name in own and name != "state" and _shown(now[name]) != _shown(before.get(name))}

    def each_call(self, snapshot: Snapshot) -> Snapshot:
        """What every piece finds as the micro-batch found it."""
        return {name: value for name, value in snapshot.items() if self.learned.get(name) == "each_call"}

    def refusal(self, before: Snapshot) -> Refusal | None:
        """Why pieces count otherwise than their micro-batch, by what has moved since."""
        moved = self._own_and_moved(before, self.snapshot()) if self.custom else set()
        for name in sorted(moved | {name for name, how in self.learned.items() if how == "otherwise"}):
            if self.learned.get(name, "otherwise") == "otherwise":
                what = f"{type(self._trainer).__name__}.{name}"
                reason = f"{what} moves with each micro-batch, and in pieces otherwise than in one"
                return Refusal(name="state_in_step", reason=reason, batch_bound=True)
        return None

    def merge_pieces(self, snapshot: Snapshot, weights: Sequence[float]) -> None:
        """Lists that got one entry per piece get one entry for the micro-batch: the pieces' mean, weighted."""
        for name, before in snapshot.items():
            _merged(getattr(self._trainer, name), before, weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """A small tensor, or an object of a subclass's own: itself, and what it held."""

    what: Any
    values: Any


def _is_small_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() <= _SMALL and not value.requires_grad and not value.is_inference()


def _is_own_object(value: Any) -> bool:
    """Of a class that no library of models and loops brings: TRL's running moments, a user's baseline."""
    root = type(value).__module__.split(".")[0]
    return hasattr(value, "__dict__") and root not in _LIBRARIES and not isinstance(value, _NO_STATE) and not callable(value)


def _is_plain(value: Any) -> bool:
    if _is_small_tensor(value) or _is_own_object(value):
        return True
    if isinstance(value, dict):
        return all(_is_plain(inner) for inner in value.values())
    if isinstance(value, list | deque):
        return not value or _is_plain(value[0])
    return isinstance(value, PLAIN)


def _copied(value: Any) -> Any:
    if _is_small_tensor(value):
        return _Held(what=value, values=value.clone())
    if _is_own_object(value):
        inside = {name: inner for name, inner in vars(value).items() if _is_small_tensor(inner) or isinstance(inner, PLAIN)}
        return _Held(what=value, values={name: _copied(inner) for name, inner in inside.items()})
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | deque):
        return [inner if isinstance(inner, PLAIN) else _copied(inner) for inner in value]
    return value


def _put_back(now: Any, before: Any) -> Any:
    """The earlier value, in the container that is there now, which others may hold."""
    if isinstance(before, _Held):
        if isinstance(before.what, torch.Tensor):
            with torch.no_grad():
                before.what.copy_(before.values)
        else:
            for name, inner in before.values.items():
                setattr(before.what, name, _put_back(getattr(before.what, name, None), inner))
        return before.what
    if isinstance(before, dict) and isinstance(now, dict):
        restored = {key: _put_back(now.get(key), inner) for key, inner in before.items()}
        now.clear()
        now.update(restored)
        return now
    if isinstance(before, list) and isinstance(now, list | deque):
        kept = [_put_back(there, inner) for there, inner in zip_longest(list(now)[: len(before)], before)]
        now.clear()
        now.extend(kept)
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


def _cover(value: Any, found: Covered) -> None:
    if _is_small_tensor(value):
        found.add((id(value), None))
    elif isinstance(value, dict | list | deque):
        found.add((id(value), None))
        for inner in value.values() if isinstance(value, dict) else value:
            _cover(inner, found)
    elif _is_own_object(value):
        for name, inner in vars(value).items():
            if _is_small_tensor(inner) or isinstance(inner, PLAIN):
                found.add((id(value), name))
                _cover(inner, found)


def _shown(value: Any) -> Any:
    """A copy as numbers that can be compared."""
    if isinstance(value, _Held):
        return _shown(value.values)
    if isinstance(value, torch.Tensor):
        return ["tensor", *value.detach().cpu().flatten().tolist()]
    if isinstance(value, dict):
        return {key: _shown(inner) for key, inner in value.items()}
    return [_shown(inner) for inner in value] if isinstance(value, list) else value


def _adds_up(start: Any, pair: Any, ones: Sequence[Any], weights: Sequence[float], tolerance: float) -> bool:
    """Whether what two samples added is what each added, as a sum or, of a list's new entry, as a mean."""
    if pair == start == ones[0] == ones[1]:
        return True
    values = (start, pair, *ones)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return _close(pair - start, sum(one - start for one in ones), tolerance)
    if all(isinstance(value, dict) for value in values if value is not None):
        known = [value or {} for value in values]
        keys = set().union(*known)
        return all(_adds_up(known[0].get(key), known[1].get(key), [one.get(key) for one in known[2:]], weights, tolerance) for key in keys)
    if not all(isinstance(value, list) for value in values if value is not None):
        return False
    lists = [value or [] for value in values]
    if {len(one) for one in lists} == {len(lists[0])}:
        places = zip(*lists, strict=True)
        return all(_adds_up(old, two, rest, weights, tolerance) for old, two, *rest in places)
    new = [value[-1] for value in lists[1:] if len(value) == len(lists[0]) + 1 and value[:-1] == lists[0]]
    if len(new) < len(lists) - 1 or not all(isinstance(one, int | float) for one in new):
        return False
    return _close(new[0], sum(one * weight for one, weight in zip(new[1:], weights, strict=True)) / sum(weights), tolerance)


def _close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other))
