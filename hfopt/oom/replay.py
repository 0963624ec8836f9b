"""What is kept of one accumulation window so that its step can be run again: batches, random states, counters, buffers.

A forward that is repeated would move them twice, and one in pieces once per piece. So they are noted where a window begins and put back
before it is run again; a model that moves them is not run in pieces. Cheap: buffers are known by their version counters, and only those
that were seen to move (in the first window: all, while they are small) are copied. The Trainer clears the model's gradients after each
step and no others: weights that a loss brings along may have some when a window begins.

The state of every random generator a training step may draw from, noted and put back. It is noted before each step, so it must cost little:
numpy builds its state number by number, and hardly any step draws from numpy. So the generator's memory is compared first, and the state
noted before is taken again where nothing was drawn.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hfopt.oom import split_batch
from hfopt.oom.kept_state import Covered, Look
from hfopt.oom.left_behind import Found
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
PLAIN = (int, float, str, bool, type(None))


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

    def covered(self, noted: Noted) -> Covered:
        """What `restore` puts back."""
        buffers = dict(self.model.named_buffers())
        numbers = {(id(module), key) for name, module in self._own for key in noted.numbers[name]}
        return numbers | {(id(buffers[name]), None) for name in noted.copies if name in buffers}

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
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN) and name != "training"}


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
    restore_host(state)
    restore_torch(state)


def restore_torch(state: RngState) -> None:
    """Of torch alone: numpy and Python go on."""
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        getattr(torch, state.device_type).set_rng_state(state.device)


def of_torch(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where torch's own generators stand, to be compared."""
    host = torch.get_rng_state()
    return (host,) if device.type == "cpu" else (host, getattr(torch, device.type).get_rng_state())


def alike(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def moved_in_torch(since: RngState) -> bool:
    """Whether anything was drawn since."""
    now = None if since.device is None else getattr(torch, since.device_type).get_rng_state()
    return not torch.equal(torch.get_rng_state(), since.cpu) or (now is not None and not torch.equal(now, since.device))


def restore_host(state: RngState) -> None:
    """Of numpy and Python alone."""
    random.setstate(state.python)
    np.random.set_state(state.numpy)


def of_the_host() -> tuple[Any, str]:
    """Where numpy and Python stand, to be compared."""
    return random.getstate(), repr(np.random.get_state(legacy=False))


def moved_on_the_host(since: RngState) -> bool:
    return of_the_host() != (since.python, repr(since.numpy))


@dataclass(kw_only=True, slots=True)
class AccumulationWindow:
    """The dicts are copies, the tensors are the Trainer's own, which it holds as long as we do: no memory is added."""

    batches: list[Inputs]
    written: list[tuple[int, ...]]
    size: int | None  # samples per piece, None: whole micro-batches
    index: int = 0  # of the micro-batch that runs
    rng: RngState | None = None
    rngs: dict[int, RngState] = field(default_factory=dict)  # of later micro-batches, where something may draw between them
    first_counters: dict[str, Any] = field(default_factory=dict)  # when the window began
    counters: dict[str, Any] = field(default_factory=dict)  # when this micro-batch began
    attempts: int = 0
    cleared: set[int] = field(default_factory=set)  # sizes that were tried again after clearing
    failed: bool = False
    state: Noted | None = None
    found: Found | None = None  # the model when it began
    norm: float = 0.0  # of the gradients when the last micro-batch had ended, where a callback of the script may touch them
    touched: bool = False  # it did
    kept: Look | None = None  # what the script's own code keeps, since memory ran out last
    losses: list[torch.Tensor] = field(default_factory=list)  # of the micro-batches that went through
    step: int = 0  # the Trainer's global step when it began

    @classmethod
    def of(cls, batches: Sequence[Any], size: int | None) -> AccumulationWindow:
        return cls(batches=[split_batch.shallow_copy(b) for b in batches], written=[split_batch.versions(b) for b in batches], size=size)

    @property
    def noted(self) -> Noted:
        assert self.state is not None, "noted where the window began"
        return self.state

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
