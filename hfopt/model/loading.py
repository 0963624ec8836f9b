"""Weights loaded onto the card one by one, into a block taken for all of them: what `from_pretrained` does with a device_map.

TRL's trainers give one where they load a model by its name on one card (`create_model_from_path`, trl/trainer/utils.py), as `trl sft` does.
transformers then takes one block for all weights and frees it (`caching_allocator_warmup`, transformers/modeling_utils.py); the weights
follow in the order of their names (`convert_and_load_state_dict_in_model`, transformers/core_model_loading.py). So they lie in one segment,
and small ones leave a gap in it, where a model that is moved by its Trainer has a segment for each large weight: the same steps may then
reserve a tenth more or less. A mark on each weight says so; it outlives adapters, copies and fakes.

Known limits: up to four threads load at once, so neighbours may change places; packed weights, which pass through their whole size, are
left as if they were moved; a model that takes nearly all of the card gets a smaller block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hfopt.model.losses import REFERENCE
from hfopt.units import GIB, MIB

_MARK = "hfopt_loaded"  # on a parameter: which model's it is, and its place in the order
_SEGMENT = 2 * MIB  # c10/core/AllocatorConfig.h: of requests up to half of it
_SMALL_REQUEST = 1 * MIB
_ROUNDED = 512
_WORTH_ANOTHER = 3 * GIB // 2  # beyond what is cached


def mark_loaded(model: nn.Module) -> nn.Module:
    """The model, whose weights are loaded onto the card, then those of a reference beside it; not adapters, which are put on it later."""
    if not all(parameter.is_floating_point() for parameter in model.parameters()):
        return model
    loaded = ((name, parameter) for name, parameter in model.named_parameters() if not _put_on(name))
    for place, (name, parameter) in enumerate(sorted(loaded, key=lambda item: _natural(item[0]))):
        parameter.__dict__[_MARK] = int(name.startswith(f"{REFERENCE}.")), place
    return model


def _put_on(name: str) -> bool:
    """By peft: an adapter, or a trained copy of a module."""
    return any(part.startswith("lora_") or part == "modules_to_save" for part in name.split("."))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Numbers by their value and before words (`dot_natural_key`)."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


@dataclass(frozen=True, kw_only=True, slots=True)
class CardLoad:
    """One model's: the block that is taken and freed first (0: none), then the weights in their order."""

    block_bytes: int
    weights: tuple[nn.Parameter, ...]


def card_loads(model: nn.Module) -> Iterator[CardLoad]:
    """Of all models in it whose weights are marked, in the order in which they are loaded. Before the first, a number that accelerate puts
    onto the card has taken a small segment (`get_max_memory`)."""
    marked: dict[int, list[tuple[int, Any]]] = {}
    for parameter in model.parameters():
        if _MARK in parameter.__dict__:
            number, place = parameter.__dict__[_MARK]
            marked.setdefault(number, []).append((place, parameter))
    cached = _SEGMENT
    for _, weights in sorted(marked.items(), key=lambda item: item[0]):
        ordered = tuple(parameter for _, parameter in sorted(weights, key=lambda item: item[0]))
        sizes = [parameter.untyped_storage().nbytes() for parameter in ordered]
        block = _warm_up_bytes(sum(sizes), cached)
        yield CardLoad(block_bytes=block, weights=ordered)
        cached = _left_over(sizes, cached, block)


def _warm_up_bytes(needed: int, cached: int) -> int:
    """Less what is cached, unless torch would take the block from there."""
    if needed - cached > cached:
        return needed - cached
    return cached + 1 if needed - cached > _WORTH_ANOTHER else 0


def _left_over(sizes: list[int], cached: int, block: int) -> int:
    """What stays cached: the gap that small weights leave in the block, and the end of their last segment."""
    small = sum(-(-size // _ROUNDED) * _ROUNDED for size in sizes if size <= _SMALL_REQUEST)
    large = sum(size for size in sizes if size > _SMALL_REQUEST)
    return max(0, cached - _SEGMENT + -(-block // _SEGMENT) * _SEGMENT - large) + -(-small // _SEGMENT) * _SEGMENT - small
