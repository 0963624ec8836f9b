"""What a step moves besides the model's weights: buffers, numbers on modules of the user's own, gradients of weights beside the model.

A forward that is repeated would move them twice, and one in pieces once per piece. So they are noted where a window begins and put back
before it is run again; a model that moves them is not run in pieces. Cheap: buffers are known by their version counters, and only those
that were seen to move (in the first window: all, while they are small) are copied. The Trainer clears the model's gradients after each
step and no others: weights that a loss brings along may have some when a window begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hfopt.oom.step_down import Refusal

_FIRST_COPY_BYTES = 64 << 20
_LIBRARIES = frozenset(
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
        self._own = [(name, module) for name, module in modules if type(module).__module__.split(".")[0] not in _LIBRARIES]

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
