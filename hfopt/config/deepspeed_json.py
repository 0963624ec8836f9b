"""The JSON file, mapping or name that `deepspeed` and `fsdp_config` hold: where it is looked for, and what stands in for it.

transformers reads a path from the current folder. Configs are often planned from elsewhere, so the YAML's own folder and those above it are
tried too. ms-swift ships its configs under names (`zero2`, `zero3_offload`); they are DeepSpeed's defaults with `auto` sizes. A file that
is nowhere may still say its stage by its name (`ds_z3_offload_config.json`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.errors import ConfigError

_SHIPPED = re.compile(r"zero([0-3])(_offload)?$")  # ms-swift: swift/llm/ds_config/*.json
_STAGE = re.compile(r"(?:(?<![a-z])z|zero|stage)[-_]?([0-3])(?!\d)")  # ds_z3_config.json, zero2.json, ds_config_stage_2.json
_MOST_PARENTS = 5


def config_mapping(value: Any, key: str, folder: Path | None) -> Mapping[str, Any]:
    """What `value` says, `fsdp_` prefixes taken off; ConfigError where it names a file that is not there or no JSON object."""
    if isinstance(value, Mapping):
        return {str(name).removeprefix("fsdp_"): item for name, item in value.items()}
    found = find_json(value, folder)
    if found is None and key == "deepspeed" and (shipped := shipped_config(str(value))) is not None:
        return shipped
    if found is None:
        where = " and ".join(map(str, _places(value, folder)[:2]))
        advice = "; --assume-zero 3 plans with DeepSpeed's defaults of that stage" if key == "deepspeed" else ""
        raise ConfigError(f"{key}: {value} is not there", hint=f"looked for {where}, and in the folders above{advice}")
    try:
        parsed = json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{key}: {found} is no JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{key}: {found} holds no JSON object")
    return {str(name).removeprefix("fsdp_"): item for name, item in parsed.items()}


def find_json(value: Any, folder: Path | None) -> Path | None:
    return next((place for place in _places(value, folder) if place.is_file()), None)


def is_missing(value: Any, folder: Path | None) -> bool:
    """Does it name a file that cannot be found?"""
    return isinstance(value, str) and bool(value) and find_json(value, folder) is None and shipped_config(value) is None


def _places(value: Any, folder: Path | None) -> list[Path]:
    path = Path(str(value)).expanduser()
    if folder is None or path.is_absolute():
        return [path]
    above = folder.resolve()
    near = [path] if folder == Path() else [path, folder / path]
    return [*near, *(parent / path for parent in list(above.parents)[:_MOST_PARENTS])]


def shipped_config(name: str) -> dict[str, Any] | None:
    """By ms-swift's name for it."""
    match = _SHIPPED.match(name)
    return None if match is None else zero_defaults(int(match[1]), offloads=match[2] is not None)


def named_stage(value: Any) -> int | None:
    """The stage of ZeRO that the name of a config says, whether or not its file is here; None where it says none."""
    found = _STAGE.search(Path(str(value)).stem.lower()) if isinstance(value, str) else None
    return None if found is None else int(found[1])


def by_its_name(value: Any) -> dict[str, Any] | None:
    """A config as its name describes it: the stage, and whether it offloads, with DeepSpeed's defaults."""
    stage = named_stage(value)
    return None if stage is None else zero_defaults(stage, offloads="offload" in str(value).lower())


def zero_defaults(stage: int, *, offloads: bool = False) -> dict[str, Any]:
    """A stage with DeepSpeed's own defaults, and what transformers fills in left to it."""
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    if offloads:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
