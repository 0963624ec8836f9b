"""The bundled architectures: hub id → configuration fields, so that planning needs neither network nor a gated licence.

`architectures.jsonl` holds one model per line: its `config.json` fields, the published parameter count with its source, and whether that
counts the model with its head (`head`) or the base model alone (`base`); or, for a model trained from another one, `same_as` and the
fields that differ. Every line states what its own checkpoint is stored in (`torch_dtype`), which a model does not have from the one it was
made from: Gemma 2 is published in float32, its instruct version in bfloat16. Names are matched without regard to case, with or without the
owner: `bert-base-uncased` is `google-bert/bert-base-uncased`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    hub_id: str
    config: Mapping[str, Any]
    parameters: int  # as published
    counts: Literal["head", "base"]
    rounded: bool  # published as '317M', not to the last parameter
    source: str
    same_as: str | None = None


@cache
def architectures() -> tuple[Architecture, ...]:
    lines = files("hfopt.model").joinpath("architectures.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    return tuple(_architecture(record, records) for record in records.values())


def find(name: str) -> Architecture | None:
    """The entry of that name, in any case; without an owner only when all who have it mean one architecture: then its first owner's."""
    wanted = name.strip().lower()
    exact = [entry for entry in architectures() if entry.hub_id.lower() == wanted]
    bare = [entry for entry in architectures() if entry.hub_id.lower().partition("/")[2] == wanted]
    found = exact or bare
    return found[0] if len({entry.same_as or entry.hub_id for entry in found}) == 1 else None


def find_under_any_owner(name: str) -> Architecture | None:
    """A re-upload: the same name under another owner."""
    owner, _, bare = name.strip().rpartition("/")
    return find(bare) if owner else None


def near_names(name: str, count: int = 3) -> list[str]:
    """Names of the table that the user may have meant."""
    by_key: dict[str, str] = {}
    for entry in architectures():
        by_key[entry.hub_id.lower()] = entry.hub_id
        by_key[entry.hub_id.lower().partition("/")[2]] = entry.hub_id
    wanted = name.strip().lower()
    keys = difflib.get_close_matches(wanted, by_key, n=2 * count, cutoff=0.75)
    keys += difflib.get_close_matches(wanted.rpartition("/")[2], by_key, n=2 * count, cutoff=0.75)
    return list(dict.fromkeys(by_key[key] for key in keys))[:count]


def _architecture(record: dict[str, Any], records: Mapping[str, dict[str, Any]]) -> Architecture:
    base = records[record.get("same_as", record["id"])]
    return Architecture(
        hub_id=record["id"],
        config={**base["config"], **record.get("config", {})},
        parameters=base["parameters"],
        counts=base["counts"],
        rounded=base.get("rounded", False),
        source=record["source"],
        same_as=record.get("same_as"),
    )
