"""What a command printed with `--json`, checked against the schema that `hfopt schema` prints for it; more keys than it states fail too."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator

from hfopt.cli.schema import schema_of


def validated(name: str, text: str) -> Any:
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    data = json.loads(text, parse_constant=lambda word: _no_number(word))
    Draft202012Validator(schema).validate(data)
    bare = {key: item for key, item in data.items() if key != "schema"} if isinstance(data, dict) else data
    Draft202012Validator(_closed({key: item for key, item in schema.items() if key not in ("properties", "required")})).validate(bare)
    return data


def _closed(schema: Any) -> Any:
    """Programs must bear new keys; we must not print one that no type has."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _closed(one) for key, one in schema.items()}
    return {**made, "additionalProperties": False} if isinstance(schema.get("properties"), dict) and "type" in schema else made


def _no_number(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")
