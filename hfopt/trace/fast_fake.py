"""Fake operations answered from memory: the same operation on the same shapes gives the same shapes, layer after layer and step after step.

FakeTensorMode spends most of a trace on hashing arguments into its own cache. Here the key is what decides an output's shape (operation,
sizes, strides, dtypes, plain arguments) and an output is rebuilt from its recorded size, stride and dtype. Views go straight to the meta
kernel, operations in place return their argument, optimizer kernels over lists have nothing to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_CPU = torch.device("cpu")
_CHANGES_SHAPE = frozenset(
    ("resize_", "resize_as_", "set_", "transpose_", "t_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_", "as_strided_", "detach_")
)
_NO_KEY = object()


@dataclass(frozen=True, slots=True)
class _Output:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Kind:
    """What can be done with an operation, read off its schema once."""

    __slots__ = ("in_place", "lists_only", "remembered", "view")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = func._overloadpacket.__name__
        written = [argument for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
        aliases = any(result.alias_info is not None for result in schema.returns)
        self.lists_only = bool(written) and not schema.returns and name.startswith(("_foreach_", "_fused_", "_amp_"))
        self.in_place = (
            len(written) == 1 and written[0] is schema.arguments[0] and len(schema.returns) == 1 and aliases and name not in _CHANGES_SHAPE
        )
        self.view = bool(func.is_view) and not written
        self.remembered = not written and not aliases and bool(schema.returns)


class FastFake:
    """Runs operations for a recorder, through the fake mode the first time and from memory afterwards."""

    def __init__(self, fake_mode: Any) -> None:
        self._mode = fake_mode
        self._kinds: dict[Any, _Kind] = {}
        self._known: dict[Any, _Output | tuple[_Output | int | None, ...]] = {}

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _Kind(func)
        if kind.lists_only:
            return None
        if kind.view and len(args) and isinstance(args[0], FakeTensor) and not kwargs:
            return self._viewed(func, args)
        if not (kind.remembered or kind.in_place):
            return func(*args, **kwargs)
        key = _key(args)
        if key is _NO_KEY:
            return func(*args, **kwargs)
        if kwargs:
            extra = _key(tuple(kwargs.items()))
            if extra is _NO_KEY:
                return func(*args, **kwargs)
            key = (key, extra)
        key = (func, key)
        known = self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            self._remember(key, kind, args, out)
            return out
        if kind.in_place:
            return args[0]
        if isinstance(known, _Output):
            return self._fresh(known)
        return tuple(self._fresh(leaf) if isinstance(leaf, _Output) else leaf for leaf in known)

    def _viewed(self, func: Any, args: Sequence[Any]) -> Any:
        with in_kernel_invocation_manager(self._mode):
            out = func(*args)
        if isinstance(out, torch.Tensor):
            return FakeTensor(self._mode, out, _CPU)
        return type(out)(FakeTensor(self._mode, leaf, _CPU) for leaf in out)

    def _fresh(self, output: _Output) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(output.size, output.stride, dtype=output.dtype, device="meta")
        return FakeTensor(self._mode, empty, _CPU)

    def _remember(self, key: Any, kind: _Kind, args: Sequence[Any], out: Any) -> None:
        if kind.in_place:
            if out is args[0]:
                self._known[key] = ()
        elif isinstance(out, FakeTensor):
            if _is_fresh(out, args):
                self._known[key] = _output(out)
        elif isinstance(out, tuple) and out and all(_is_plain(leaf) or _is_fresh(leaf, args) for leaf in out):
            self._known[key] = tuple(leaf if _is_plain(leaf) else _output(leaf) for leaf in out)


def _output(tensor: torch.Tensor) -> _Output:
    return _Output(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _is_plain(leaf: Any) -> bool:
    """No tensor: what attention kernels return among others (lengths, None where there is no mask)."""
    return leaf is None or type(leaf) is int


def _is_fresh(tensor: Any, args: Sequence[Any]) -> bool:
    """A fake tensor with a storage of its own, filled from the start and on the device that is traced."""
    if not isinstance(tensor, FakeTensor):
        return False
    storage = tensor.untyped_storage()._cdata
    shared = any(isinstance(arg, torch.Tensor) and arg.untyped_storage()._cdata == storage for arg in args)
    return not shared and tensor.storage_offset() == 0 and tensor.device == _CPU


def _key(values: Sequence[Any]) -> Any:
    """A hashable stand-in for arguments, or _NO_KEY."""
    parts: list[Any] = []
    for value in values:
        if isinstance(value, FakeTensor):
            parts.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, torch.Tensor):
            return _NO_KEY
        elif isinstance(value, (list, tuple)):
            inner = _key(value)
            if inner is _NO_KEY:
                return _NO_KEY
            parts.append(inner)
        elif isinstance(value, (bool, int, float)):
            parts.append((type(value), value))  # 1, 1.0 and True are equal keys but not equal arguments
        elif value is None or isinstance(value, (str, torch.dtype, torch.device, torch.layout, torch.memory_format)):
            parts.append(value)
        else:
            return _NO_KEY
    return tuple(parts)
