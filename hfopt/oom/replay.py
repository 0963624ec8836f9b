"""What is kept of one accumulation window so that its step can be run again: batches, random states, counters, buffers.

A forward that is repeated would move them twice, and one in pieces once per piece. So they are noted where a window begins and put back
before it is run again; a model that moves them is not run in pieces. Cheap: buffers are known by their version counters, and only those
that were seen to move (in the first window: all, while they are small) are copied. The Trainer clears the model's gradients after each
step and no others: weights that a loss brings along may have some when a window begins.

The state of every random generator a training step may draw from, noted and put back. It is noted before each step, so it must cost little:
numpy builds its state number by number, and hardly any step draws from numpy. So the generator's memory is compared first, and the state
noted before is taken again where nothing was drawn.

What a Trainer subclass counts for itself while it computes a loss, put back before a step is repeated. A subclass may count in
`compute_loss` (TRL's SFTTrainer: tokens seen, entropy, accuracy). A repeated step would count twice, so the plain values it keeps on itself
(numbers, strings, and dicts and lists of them) are noted before each micro-batch and restored before the repetition. The Trainer itself
counts between micro-batches only, so nothing of its own is set back.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from hfopt.oom import split_batch
from hfopt.oom.split_batch import Inputs
from hfopt.oom.step_down import Refusal

_FIRST_COPY_BYTES = 64 << 20
_MODULE_LIBRARIES = frozenset(
    {
        "torch",
        "transformers",
        "peft",
        "trl",
        "accelerate",
        "sentence_transformers",
        "bitsandbytes",
        "timm",
        "torchvision",
        "torchaudio",
        "liger_kernel",
    }
)
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Noted:
    versions: dict[str, tuple[int, int]]  # identity and version of each buffer
    copies: dict[str, torch.Tensor]
    numbers: dict[str, dict[str, Any]]  # by module
    gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]]  # of weights that are trained beside the model
    begun: bool  # the model itself had gradients already


@dataclass(slots=True)
class ForwardState:
    trainer: Any
    model: torch.nn.Module = field(init=False)
    _moving: set[str] | None = None  # None: no window has come to its end yet
    _own: list[tuple[str, torch.nn.Module]] = field(default_factory=list)
    _beside: tuple[int, list[torch.nn.Parameter]] = (0, [])  # of which optimizer, and its weights that are not the model's

    def __post_init__(self) -> None:
        self.model = self.trainer.model
        modules = self.model.named_modules()
        self._own = [(name, module) for name, module in modules if type(module).__module__.split(".")[0] not in _MODULE_LIBRARIES]

    def note(self) -> Noted:
        buffers = dict(self.model.named_buffers())
        known = self._moving
        if known is None:
            small = sum(value.numel() * value.element_size() for value in buffers.values()) <= _FIRST_COPY_BYTES
            known = set(buffers) if small else set()
        kept = {name: value.detach() for name, value in buffers.items() if name in known}
        first = self._moving is None  # before it is known what moves, the card's memory is not taken for it
        copies = {name: value.to("cpu", copy=True) if first else value.clone() for name, value in kept.items()}
        return Noted(
            versions=_versions(buffers),
            copies=copies,
            numbers={name: _numbers(module) for name, module in self._own},
            gradients=[(one, None if one.grad is None else one.grad.clone()) for one in self._weights_beside()],
            begun=any(bool(one.grad.any()) for one in self.model.parameters() if one.grad is not None),
        )

    def _weights_beside(self) -> list[torch.nn.Parameter]:
        optimizer = self.trainer.optimizer
        if optimizer is not None and self._beside[0] != id(optimizer):
            known = {id(parameter) for parameter in self.model.parameters()}
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._beside = (id(optimizer), [parameter for parameter in trained if id(parameter) not in known])
        return self._beside[1]

    def through(self, noted: Noted) -> None:
        """A window came to its end: what moved in it is copied from now on."""
        moved = self._touched(noted)
        self._moving = moved if self._moving is None else self._moving | moved

    def restore(self, noted: Noted) -> None:
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name in self._touched(noted):
                if name in noted.copies and name in buffers and buffers[name].shape == noted.copies[name].shape:
                    buffers[name].copy_(noted.copies[name])
        for name, module in self._own:
            for key, value in noted.numbers[name].items():
                setattr(module, key, value)
        for parameter, gradient in noted.gradients:
            parameter.grad = None if gradient is None else gradient.clone()

    def refusal(self, noted: Noted) -> Refusal | None:
        """Why the window cannot be run in pieces, when something has moved by its value since it began."""
        buffers = dict(self.model.named_buffers())
        for name in sorted(self._touched(noted)):
            if (
                name not in noted.copies
                or name not in buffers
                or not torch.equal(buffers[name], noted.copies[name].to(buffers[name].device))
            ):
                return _moved(f"the buffer {name!r}")
        for name, module in self._own:
            now = _numbers(module)
            changed = [key for key, value in noted.numbers[name].items() if now.get(key) != value]
            if changed:
                return _moved(f"{changed[0]!r} of {name or 'the model'!r}")
        return None

    def _touched(self, noted: Noted) -> set[str]:
        now = _versions(dict(self.model.named_buffers()))
        return {name for name, version in now.items() if noted.versions.get(name) != version}


def _moved(what: str) -> Refusal:
    return Refusal(name="state_in_forward", reason=f"the model changes {what} in its forward, once per batch", batch_bound=True)


def _versions(buffers: dict[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(value), 0 if value.is_inference() else value._version) for name, value in buffers.items()}


def _numbers(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name != "training"}


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
    restore_torch(state)


def restore_torch(state: RngState) -> None:
    """Of torch alone: numpy and Python go on."""
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        getattr(torch, state.device_type).set_rng_state(state.device)


def moved(since: RngState) -> bool:
    """Whether anything was drawn since."""
    now = None if since.device is None else getattr(torch, since.device_type).get_rng_state()
    same = torch.equal(torch.get_rng_state(), since.cpu) and (now is None or torch.equal(now, since.device))
    return not same or moved_on_the_host(since)


def moved_on_the_host(since: RngState) -> bool:
    """numpy and Python: how their numbers belong to the samples cannot be known."""
    return random.getstate() != since.python or repr(_numpy.state()) != repr(since.numpy)


Snapshot = dict[str, Any]
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
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    if _is_small_tensor(value):
        return _Held(what=value, values=value.clone())
    if _is_own_object(value):
        inside = {name: inner for name, inner in vars(value).items() if _is_small_tensor(inner) or isinstance(inner, _PLAIN)}
        return _Held(what=value, values={name: _copied(inner) for name, inner in inside.items()})
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | deque):
        return [inner if isinstance(inner, _PLAIN) else _copied(inner) for inner in value]
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
