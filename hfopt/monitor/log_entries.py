"""What each line of a log must hold to be believed: a log may come from another machine, version or hand.

A line is checked against types, the dataclasses of hfopt/schema among them; what is unknown is passed over, what is wrong is a TypeError
that names its place. Numbers are finite and of a size a run can have, so that no arithmetic on them can fail.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from hfopt.schema import Change

_MOST = 1e18  # bytes, seconds, tokens: no figure of a run is larger

KINDS: Mapping[str, Mapping[str, Any]] = {
    "header": {
        "time": float,
        "model": str | None,
        "device": str,
        "gpus": tuple[Mapping[str, Any], ...],
        "versions": Mapping[str, str | None],
        "world_size": int,
        "max_steps": int | None,
        "first_step": int,
        "config": Mapping[str, Any],
    },
    "finding": {
        "step": int,
        "time": float,
        "cause": str,
        "confidence": float,
        "evidence": Mapping[str, Any],
        "message": str,
        "changes": tuple[Change, ...],
        "predicted_gain": float | None,
    },
    "resolved": {"step": int, "time": float, "cause": str},
    "fallback": {"time": float, "seen": Mapping[str, Any], "step": Mapping[str, Any]},
    "summary": {"time": float, "step": int, "off": Mapping[str, str]},
    "receipt": {
        "time": float,
        "planned_for": str,
        "predicted_step_s": float | None,
        "measured_step_s": float | None,
        "predicted_reserved_bytes": int | None,
        "measured_reserved_bytes": int | None,
        "why_not": str | None,
    },
    "window": {"time": float, "window": Mapping[str, Any]},
}
"""The fields of an entry that are read back; `time` is always there, the others may be missing."""


def check(entry: Mapping[str, Any]) -> None:
    """Raises TypeError or KeyError."""
    for name, kind in KINDS.get(entry["kind"], {"time": float}).items():
        if name in entry or name == "time":
            checked(entry[name], kind, f"{entry['kind']}.{name}")


def checked(value: Any, kind: Any, place: str) -> Any:
    """The value as its type has it: lists become tuples, objects dataclasses."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return _one_of(value, inner, place)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        known, make = get_type_hints(kind), cast(Callable[..., Any], kind)
        return make(**{name: checked(one, known[name], f"{place}.{name}") for name, one in value.items() if name in known})
    if origin is tuple and isinstance(value, list):
        return tuple(checked(one, inner[0], place) for one in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: checked(one, inner[1], f"{place}.{name}") for name, one in value.items()}
    if kind in (int, float) and _is_number(value, kind):
        return value
    if (kind is bool and isinstance(value, bool)) or ((kind is str or origin is Literal) and isinstance(value, str)):
        return value
    raise TypeError(f"{place} is {str(value)[:40]!r}")


def _one_of(value: Any, kinds: tuple[Any, ...], place: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    other = [kind for kind in kinds if kind is not type(None)]
    assert len(other) == 1, f"{place}: only T | None is read back"
    return checked(value, other[0], place)


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not isinstance(value, int)):
        return False
    return math.isfinite(value) and abs(value) <= _MOST if isinstance(value, float) else abs(value) <= _MOST
