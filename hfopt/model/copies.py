"""Copies of a live model, with or without its weights, together with the modules its Trainer keeps beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from hfopt.errors import WorkloadError
from hfopt.model.build import build_here
from hfopt.model.companions import carry, companions, modules_of
from hfopt.model.quantize import stand_in

_FROM_CONFIG = "plan from the config (hfopt plan CONFIG) instead of from the live trainer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies:
    """Builds copies of the live model: without weights where tensors are fake or meta, with them for real."""

    trainer: Any
    template: nn.Module

    @property
    def config(self) -> Any:
        """The model's own, None where it has none."""
        return getattr(self.template, "config", None)

    def __call__(self) -> nn.Module:
        return build_here(lambda: copy.deepcopy(self.template), real=lambda: _copied(self.trainer, keep_weights=True))


def copies_of(trainer: Any) -> Copies:
    _check_whole(trainer)
    unknown = next((type(parameter).__name__ for parameter in _packed_elsewhere(trainer.model)), None)
    if unknown is not None:
        raise WorkloadError(f"the model holds packed weights ({unknown}) outside of layers that hfopt knows", hint=_FROM_CONFIG)
    return Copies(trainer=trainer, template=_copied(trainer, keep_weights=False))


def _packed_elsewhere(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if stand_in(module) is None:
            yield from (parameter for parameter in module.parameters(recurse=False) if hasattr(parameter, "quant_state"))


def _check_whole(trainer: Any) -> None:
    """A model of which this process holds only a part does not show what a step takes."""
    if any(hasattr(parameter, "ds_id") or type(parameter.data).__name__ == "DTensor" for parameter in trainer.model.parameters()):
        raise WorkloadError("the model was loaded in shards (ZeRO-3, a DistributedConfig): its parts cannot be traced", hint=_FROM_CONFIG)
    if getattr(trainer, "is_model_parallel", False):
        raise WorkloadError("the model is spread over several devices (device_map): one device does not hold a step", hint=_FROM_CONFIG)


def _copied(trainer: Any, *, keep_weights: bool) -> nn.Module:
    """A deep copy on the CPU; without weights each parameter is replaced by its outline on the meta device."""
    model, beside = trainer.model, companions(trainer)
    memo: dict[int, Any] = {}
    for module in (model, *modules_of(beside)):
        for parameter in module.parameters():
            memo[id(parameter)] = _parameter(parameter, keep_weights=keep_weights)
        for buffer in module.buffers():
            memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
        if not keep_weights:  # packed weights have no outline of their own
            memo |= {id(part): standing for part in module.modules() if (standing := stand_in(part)) is not None}
    try:
        twin, beside = copy.deepcopy((model, beside), memo)
    except (TypeError, RuntimeError, AttributeError) as error:
        raise WorkloadError(f"{type(model).__name__} cannot be copied: {error}", hint=_FROM_CONFIG) from error
    for module in (twin, *modules_of(beside)):
        _as_before_training(module)
    if beside:
        carry(twin, beside)
    if getattr(twin, "is_gradient_checkpointing", False):
        twin.gradient_checkpointing_disable()
    if not keep_weights and uses_flash_kernel(twin):
        twin.set_attn_implementation("sdpa")
    assert isinstance(twin, nn.Module)
    return twin.train()


def uses_flash_kernel(model: Any) -> bool:
    """A package's CUDA kernel; PyTorch's own takes the same memory, where no sample is padded, which is how the packages see a batch."""
    name = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return hasattr(model, "set_attn_implementation") and (name.startswith("flash_attention") or "/" in name)


def _parameter(parameter: nn.Parameter, *, keep_weights: bool) -> nn.Parameter:
    values: torch.Tensor = parameter.detach()
    copied = nn.Parameter(values.to("cpu", copy=True) if keep_weights else values.to("meta"), requires_grad=parameter.requires_grad)
    copied.__dict__.update(parameter.__dict__)
    return copied


def _as_before_training(module: nn.Module) -> None:
    """Without what accelerate put around its forward; a forward of the user's own (or of TRL's) stays."""
    original = module.__dict__.pop("_original_forward", None)
    if original is None:
        return
    module.__dict__.pop("forward", None)
    if isinstance(original, MethodType) and original.__func__ is not type(module).forward:
        module.__dict__["forward"] = original
