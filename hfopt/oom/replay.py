"""What is kept of one accumulation window so that its step can be run again: batches, random states, counters.

The state of every random generator a training step may draw from, noted and put back.

It is noted before each step, so it must cost little: numpy builds its state number by number, and hardly any step draws from numpy. So the
generator's memory is compared first, and the state noted before is taken again where nothing was drawn.

What a Trainer subclass counts for itself while it computes a loss, put back before a step is repeated.

A subclass may count in `compute_loss` (TRL's SFTTrainer: tokens seen, entropy, accuracy). A repeated step would count twice, so the plain
values it keeps on itself (numbers, strings, and dicts and lists of them) are noted before each micro-batch and restored before the
repetition. The Trainer itself counts between micro-batches only, so nothing of its own is set back.

One accumulation window: the micro-batches between two optimizer steps, kept so that the step can be run again.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hfopt.oom import split_batch
from hfopt.oom.forward_state import Noted
from hfopt.oom.split_batch import Inputs
from hfopt.oom.step_down import Refusal

_MT19937_BYTES = 4 * 624 + 4  # uint32 key[624]; int pos, numpy/random/src/mt19937/mt19937.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RngState:
    python: Any
    numpy: Any
    cpu: torch.Tensor
    device_type: str
    device: torch.Tensor | None


class _NumpyGenerator:
    """numpy's global generator, with what was last noted of it."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address: int | None = None
        self._raw: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        raw = self._memory()
        if raw is None or raw != self._raw:
            self._state = np.random.get_state(legacy=False)
            # a second normal number kept in store is used up without a change of the memory compared
            self._raw = raw if raw is not None and not self._state["has_gauss"] else None
        return self._state

    def _memory(self) -> bytes | None:
        generator = np.random.mtrand._rand._bit_generator
        if generator is not self._generator:
            self._generator = generator
            self._address = generator.ctypes.state_address if isinstance(generator, np.random.MT19937) else None
        return ctypes.string_at(self._address, _MT19937_BYTES) if self._address is not None else None


_numpy = _NumpyGenerator()


def snapshot(device: torch.device) -> RngState:
    """Of the host's generators and of the device's current one."""
    state = getattr(torch, device.type).get_rng_state() if device.type != "cpu" else None
    return RngState(python=random.getstate(), numpy=_numpy.state(), cpu=torch.get_rng_state(), device_type=device.type, device=state)


def restore(state: RngState) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        getattr(torch, state.device_type).set_rng_state(state.device)


Snapshot = dict[str, Any]
_PLAIN = (int, float, str, bool, type(None))
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
        self._defaults = {name for base in subclasses for name, value in vars(base).items() if type(value) in _PLAIN and name[:2] != "__"}

    def snapshot(self) -> Snapshot:
        if not self.custom:
            return {}
        return {name: _copied(value) for name, value in self._kept() if _is_plain(value)}

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
    if isinstance(value, list):
        return not value or _is_plain(value[0])
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    if _is_small_tensor(value):
        return _Held(what=value, values=value.clone())
    if _is_own_object(value):
        inside = {name: inner for name, inner in vars(value).items() if _is_small_tensor(inner) or isinstance(inner, _PLAIN)}
        return _Held(what=value, values={name: _copied(inner) for name, inner in inside.items()})
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value] if value and isinstance(value[0], dict | list) else value[:]
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


@dataclass(kw_only=True, slots=True)
class AccumulationWindow:
    """The dicts are copies, the tensors are the Trainer's own, which it holds as long as we do: no memory is added."""

    batches: list[Inputs]
    written: list[tuple[int, ...]]
    size: int | None  # samples per piece, None: whole micro-batches
    index: int = 0  # of the micro-batch that runs
    rng: RngState | None = None
    first_counters: Snapshot = field(default_factory=dict)  # when the window began
    counters: Snapshot = field(default_factory=dict)  # when this micro-batch began
    attempts: int = 0
    cleared: set[int] = field(default_factory=set)  # sizes that were tried again after clearing
    failed: bool = False
    state: Noted | None = None
    step: int = 0  # the Trainer's global step when it began

    @classmethod
    def of(cls, batches: Sequence[Any], size: int | None) -> AccumulationWindow:
        return cls(batches=[split_batch.shallow_copy(b) for b in batches], written=[split_batch.versions(b) for b in batches], size=size)

    @property
    def last(self) -> bool:
        return self.index == len(self.batches) - 1

    @property
    def done(self) -> bool:
        return self.index >= len(self.batches)

    def changed_in_place(self) -> Refusal | None:
        """A tensor the model has written to is not the input any more."""
        for inputs, before in zip(self.batches[: self.index + 1], self.written, strict=False):
            if split_batch.versions(inputs) != before:
                return Refusal(name="inputs_written", reason="the model writes to its inputs in place, so they cannot be given to it again")
        return None
