"""The modules a Trainer keeps beside its model: a reference model, a loss that is a module. They are copied together.

TRL keeps `ref_model`; sentence-transformers keeps `loss` (one, or one per dataset), which holds the model itself. A copy of the model
alone would leave the loss with the live one.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hfopt.model.preference import REFERENCE

_NAMES = {"ref_model": REFERENCE, "loss": "loss"}
CARRIED = "_hfopt_companions"
"""On a copied model: its companions by the trainer's name for them. A plain attribute: a loss that holds the model is no part of it."""


def companions(trainer: Any) -> dict[str, Any]:
    """By the trainer's name for them."""
    found: dict[str, Any] = {}
    for name in _NAMES:
        value = vars(trainer).get(name)
        parts = list(value.values()) if isinstance(value, dict) else [value]
        if parts and all(isinstance(part, nn.Module) and part is not trainer.model for part in parts):
            found[name] = value
    return found


def modules_of(found: dict[str, Any]) -> tuple[nn.Module, ...]:
    return tuple(module for value in found.values() for module in (value.values() if isinstance(value, dict) else (value,)))


def trained_modules(trainer: Any) -> tuple[nn.Module, ...]:
    """All that a copy of this training's model would hold."""
    return (trainer.model, *modules_of(companions(trainer)))


def carry(model: nn.Module, found: dict[str, Any]) -> None:
    """Puts copied companions onto the copied model: a reference as a part of it (it has weights of its own), a loss beside it."""
    model.__dict__[CARRIED] = found
    reference = found.get("ref_model")
    if reference is not None:
        model.add_module(REFERENCE, reference.requires_grad_(False))


def carried(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = model.__dict__.get(CARRIED, {})
    return found
