"""Building a model wherever the caller stands: under a fake-tensor mode, on the meta device, or for real.

Fake and meta models are built the same way: every parameter goes to the meta device the moment a module registers it, so no weight is
ever held, while buffers and plain tensors stay real, so `.item()` in a constructor (drop-path rates) works. Adapters and quantization are
put on that skeleton. Then parameters become what the caller's context asks for. Nothing is swapped in place, so weak references to
parameters (which peft and the fake mode both hold) never get in the way. A real build runs the model's own initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def build_here(assemble: Callable[[], nn.Module], real: Callable[[], nn.Module] | None = None) -> nn.Module:
    """The module that `assemble()` makes, in the form of the calling context, in training mode; `real` makes it where tensors are real."""
    fake_mode = _active_fake_mode()
    if fake_mode is not None:
        model = skeleton(assemble)
        _replace_tensors(model, lambda tensor: _fake(tensor, fake_mode))
        return model
    if torch.empty(0).device.type == "meta":  # torch 2.6's get_default_device does not see a `with torch.device`
        model = skeleton(assemble)
        _replace_tensors(model, lambda tensor: tensor.to("meta"))
        return model
    return (real or assemble)().train()


@contextmanager
def unfaked() -> Iterator[None]:
    """Tensors made in here are real CPU tensors whatever the caller's context."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


def skeleton(assemble: Callable[[], nn.Module]) -> nn.Module:
    """The module with its parameters on the meta device and its buffers real."""
    with unfaked(), _parameters_on_meta():
        return assemble().train()


def _active_fake_mode() -> FakeTensorMode | None:
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, FakeTensorMode)), None)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            attributes = parameter.__dict__
            parameter = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            parameter.__dict__.update(attributes)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if tensor.device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return mode.from_tensor(tensor)


def _replace_tensors(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Each parameter and buffer once, so that what was tied stays tied."""
    converted: dict[int, Any] = {}
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is None:
                    continue
                if id(tensor) not in converted:
                    converted[id(tensor)] = _converted(tensor, convert), tensor
                registry[name] = converted[id(tensor)][0]
        if isinstance(module, nn.RNNBase):  # it keeps a list of its own
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _converted(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return convert(tensor)
    new = nn.Parameter(convert(tensor.detach()), requires_grad=tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    return new
