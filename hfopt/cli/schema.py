"""`hfopt schema`: the JSON schema of what a command prints with `--json`, made from the types that the command builds its answer with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import typer

from hfopt.cli.json_output import SCHEMA, VERSIONS, schema_name
from hfopt.cli.output import answer
from hfopt.errors import ConfigError

_OUTPUTS, _RUNS = "hfopt.schema.outputs", "hfopt.schema.run_outputs"
TYPES = {
    # the module and the name of each output's type
    "error": (_OUTPUTS, "ErrorOutput"),
    "check": (_OUTPUTS, "CheckOutput"),
    "estimate": (_OUTPUTS, "EstimateOutput"),
    "plan": (_OUTPUTS, "PlanOutput"),
    "compare": (_OUTPUTS, "CompareOutput"),
    "explain": (_OUTPUTS, "ExplainOutput"),
    "diff": (_OUTPUTS, "DiffOutput"),
    "calibrate": ("hfopt.speed.calibration", "CalibrateOutput"),
    "rehearse": (_RUNS, "RehearseOutput"),
    "report": (_RUNS, "ReportOutput"),
    "gpus": (_RUNS, "GpusOutput"),
    "cache": (_RUNS, "CacheOutput"),
    "doctor": ("hfopt.hardware.checkup", "DoctorOutput"),
}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def schema(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A command, or `error`; else the names there are.")] = None,
) -> None:
    """Print the JSON schema of a command's --json, or of an error.

    An answer that is an object names its schema and version in the key `schema`: hfopt/plan/1. Keys may be added; what is there keeps its
    name, meaning and type until the version is raised.

    \b
    Examples:
      hfopt schema                  the names
      hfopt schema plan             of `hfopt plan --json -`
      hfopt schema error            of what comes instead where something is wrong
    """
    if name is None:
        answer("".join(f"{one}  {schema_name(one)}\n" for one in VERSIONS))
    elif name not in TYPES:
        raise ConfigError(f"{name} prints no JSON", hint=f"one of: {', '.join(TYPES)}")
    else:
        answer(json.dumps(schema_of(name), indent=2, ensure_ascii=False) + "\n")


def schema_of(name: str) -> dict[str, Any]:
    """Draft 2020-12. Every type is defined once, under its own name."""
    module, kind = TYPES[name]
    found: dict[str, Any] = {}
    whole = _schema(getattr(import_module(module), kind), found)
    named = {} if whole.get("type") == "array" else {"properties": {SCHEMA: {"const": schema_name(name)}}, "required": [SCHEMA]}
    head = {"$schema": _DRAFT, "$id": f"{schema_name(name)}.json", "title": f"hfopt {name}"}
    return {**head, **named, **whole, "$defs": dict(sorted(found.items()))}


def _schema(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(one, found) for one in inner]}
    if origin is tuple and inner[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_schema(one, found) for one in inner], "minItems": len(inner), "maxItems": len(inner)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], found)}
    if isinstance(origin, type) and issubclass(origin, Sequence | frozenset):
        return {"type": "array", "items": _schema(inner[0], found)}
    if is_typeddict(kind) or is_dataclass(kind):
        return _object(kind, found)
    raise TypeError(f"{kind} has no JSON schema")


def _object(kind: Any, found: dict[str, Any]) -> dict[str, Any]:
    """A dataclass is printed whole, so every field of it is there."""
    name = kind.__name__
    if name not in found:
        found[name] = {}  # so that a type within itself ends here
        hints = get_type_hints(kind)
        required = [key for key in hints if not is_typeddict(kind) or key in kind.__required_keys__]
        idea = (kind.__doc__ or "").strip()
        found[name] = {
            "type": "object",
            **({"description": " ".join(idea.split())} if idea and not idea.startswith(f"{name}(") else {}),
            "properties": {key: _schema(one, found) for key, one in hints.items()},
            "required": required,
        }
    return {"$ref": f"#/$defs/{name}"}
