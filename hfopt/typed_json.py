"""Frozen values as JSON and back: dataclasses of a given list, tuples, lists, mappings and numpy arrays; nothing else is ever made.

Numbers, texts, booleans, None and tuples (as arrays) stand for themselves. Everything else is an object with one key that says what it
is: `{"$list": […]}`, `{"$dict": [[key, value], …]}`, `{"$array": [dtype, […]]}`, `{"Where": [field, …]}`; `{"$rows": [name, [[field, …],
…]]}` for a long tuple of one dataclass, `{"$shared": [keys, values, which]}` for a mapping with few different values. Fields whose names
begin with an underscore are what a value works out for itself: they are left out. Reading calls only the dataclasses it is given, so a
hostile text can make a wrong value, never run anything. `plain` goes one way only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral
from typing import Any

_LIST, _DICT, _SHARED, _ARRAY, _ROWS, _SET = "$list", "$dict", "$shared", "$array", "$rows", "$set"
_MANY = 16  # entries of a mapping from which on equal values are written once
_DTYPES = ("int64", "float64", "bool")
_PLAIN = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """As JSON for others, who know none of our types: an object for a dataclass, a list for what has an order or is a set, null for a
    number that is none; nothing of it is read back."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value)


class NotPlainError(ValueError):
    """A value that this JSON does not know, or a JSON that is not ours."""


def to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return _rows(value) if len(value) > 1 and is_dataclass(value[0]) else [to_json(item) for item in value]
    if kind is list:
        return {_LIST: to_json(tuple(value))}
    if kind is frozenset:
        return {_SET: [to_json(item) for item in sorted(value)]}
    if is_dataclass(value):
        return {kind.__name__: _values(value)}
    if isinstance(value, Mapping):
        if len(value) >= _MANY and (shared := _shared(value)) is not None:
            return {_SHARED: shared}
        return {_DICT: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        if not getattr(value, "shape", ()):  # one number of numpy's
            return value.item()
        if value.ndim == 1 and str(value.dtype) in _DTYPES:
            return {_ARRAY: [str(value.dtype), value.tolist()]}
    raise NotPlainError(f"{kind.__name__} has no place in this JSON")


def from_json(data: Any, classes: Iterable[type]) -> Any:
    """Raises NotPlainError where it is not what `to_json` makes of these classes."""
    return _Reading(classes).value(data)


class _Reading:
    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = {one.__name__: one for one in classes}

    def value(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(self.value(item) for item in data)
        if not isinstance(data, dict):
            return data
        if len(data) != 1:
            raise NotPlainError("an object with one key says what it is")
        ((kind, inside),) = data.items()
        try:
            return self._made(kind, inside)
        except (TypeError, ValueError, OverflowError) as error:
            raise NotPlainError(f"{kind}: {error}") from error

    def _made(self, kind: str, inside: Any) -> Any:
        if kind == _LIST:
            return list(self.value(inside))
        if kind == _SET:
            return frozenset(self.value(inside))
        if kind == _DICT:
            return {self.value(key): self.value(item) for key, item in inside}
        if kind == _SHARED:
            keys, values, which = inside
            made = self.value(values)
            return {key: made[place] for key, place in zip(self.value(keys), which, strict=True)}
        if kind == _ARRAY:
            return _array(*inside)
        if kind == _ROWS:
            name, rows = inside
            return tuple(self._object(name, row) for row in rows)
        return self._object(kind, inside)

    def _object(self, name: str, row: Any) -> Any:
        if name not in self._classes or not isinstance(row, list):
            raise NotPlainError(f"{name} is not expected here")
        made = self._classes[name]
        return made(**{field: self.value(item) for field, item in zip(_fields(made), row, strict=True)})


def _shared(value: Mapping[Any, Any]) -> list[Any] | None:
    """Keys, different values, and which of these each key has; None where values cannot be compared."""
    places: dict[Any, int] = {}
    try:
        which = [places.setdefault((type(item), item), len(places)) for item in value.values()]
    except TypeError:
        return None
    return [[to_json(key) for key in value], [to_json(item) for _, item in places], which]


def _rows(value: tuple[Any, ...]) -> Any:
    kind = type(value[0])
    if any(type(item) is not kind for item in value):
        return [to_json(item) for item in value]
    return {_ROWS: [kind.__name__, [_values(item) for item in value]]}


def _values(value: Any) -> list[Any]:
    kind: Any = type(value)
    return [to_json(getattr(value, name)) for name in _fields(kind)]


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if not field.name.startswith("_") and field.init)


def _array(dtype: str, numbers: Any) -> Any:
    import numpy as np

    if dtype not in _DTYPES or not isinstance(numbers, list):
        raise NotPlainError(f"no array of {dtype} is expected")
    made = np.array(numbers, dtype=dtype)
    if made.ndim != 1:
        raise NotPlainError("arrays have one dimension")
    return made
