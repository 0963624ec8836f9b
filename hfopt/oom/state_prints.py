"""Enough of a value to see later that it moved, without keeping or moving it: tensors, random generators, iterators.

Of tensors with more than `_EXACT` numbers a sample, their sum and their version are compared.
"""

from __future__ import annotations

import hashlib
import random
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

ATOMS = (int, float, complex, str, bytes, bool, type(None))
_EXACT = 1 << 16
_SAMPLE = 4096
ENDS = 64  # entries at each end of what is long
NEVER = "cannot be looked into"
GRAPH = "an output"  # kept with its graph: a later step cannot go back through it


def is_output(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def print_of_tensor(value: torch.Tensor) -> Any:
    """Enough of it to see that it moved."""
    if is_output(value):
        return GRAPH
    sharded = hasattr(value, "to_local")
    local = (value.to_local() if sharded else value).detach()
    version = 0 if sharded or value.is_inference() else value._version
    if local.is_meta or local.layout != torch.strided or local.is_quantized or local.is_nested:
        return tuple(value.shape), version
    flat = local.reshape(-1) if local.is_contiguous() else local.as_strided((_storage_length(local),), (1,), local.storage_offset())
    shape = tuple(value.shape)
    if flat.numel() <= _EXACT:
        return shape, _few(flat)
    return shape, version, _few(flat[:: flat.numel() // _SAMPLE]), repr(flat.sum(dtype=_sum_type(flat)).item())


def _storage_length(value: torch.Tensor) -> int:
    """From its first number to its last, whatever lies between."""
    return 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0


def _sum_type(value: torch.Tensor) -> torch.dtype | None:
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None


def _few(value: torch.Tensor) -> str:
    """All of a short vector; on a card as one sum that tells places apart, so that little is fetched."""
    if value.device.type == "cpu":
        return digest(value.contiguous().view(torch.uint8).numpy().tobytes())
    wide = torch.float32 if value.device.type == "mps" else torch.complex128 if value.is_complex() else torch.float64
    places = torch.arange(1, value.numel() + 1, device=value.device, dtype=wide)
    return repr((value.to(wide) * places).sum().item())


def digest(content: Any) -> str:
    return hashlib.blake2b(content if isinstance(content, bytes) else repr(content).encode(), digest_size=16).hexdigest()


def state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state(legacy=False)
    return {key: inner.tobytes() if isinstance(inner, np.ndarray) else inner for key, inner in _flat(state)}


def _flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in _flat(value))
        else:
            yield key, value


def standing(iterator: Any) -> Any:
    """Where an iterator stands, as far as it tells without moving."""
    frame = getattr(iterator, "gi_frame", None)
    if frame is not None or isinstance(iterator, types.GeneratorType):
        inner = getattr(iterator, "gi_yieldfrom", None)
        local = [(name, _standing_of(value)) for name, value in frame.f_locals.items()] if frame is not None else []
        return repr((frame.f_lasti if frame is not None else None, local, _standing_of(inner)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return repr([_standing_of(part) for part in iterator.__reduce__()[1:]])
    except (TypeError, AttributeError):
        return NEVER


def _standing_of(value: Any) -> Any:
    if isinstance(value, ATOMS):
        return value
    if "_num_yielded" in getattr(value, "__dict__", {}):
        return id(value), value._num_yielded
    if isinstance(value, tuple | list):
        return len(value), [_standing_of(one) for one in value[:ENDS]]
    if hasattr(type(value), "__next__"):
        return standing(value)
    return id(value), print_of_tensor(value) if isinstance(value, torch.Tensor) else None
