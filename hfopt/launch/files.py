"""What a planned run leaves in its output folder: `hfopt/plan.json`, `plan.txt` with the reasons, `config.yaml` as it trains."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfopt.planner.result import Plan
from hfopt.redact import is_secret
from hfopt.schema import Change

PLAN, REPORT, CONFIG = "plan.json", "plan.txt", "config.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """An earlier plan of this folder."""

    changes: tuple[Change, ...]
    divides_loss: bool


def folder_of(args: Any) -> Path:
    return Path(args.output_dir or ".") / "hfopt"


def write_plan(folder: Path, plan: Plan, divides_loss: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    said = {**plan.to_json(), "divides_loss": divides_loss}
    _write(folder / PLAN, json.dumps(said, indent=2, ensure_ascii=False, default=str) + "\n")
    _write(folder / REPORT, plan.report())


def read_plan(folder: Path) -> Known | None:
    try:
        said = json.loads((folder / PLAN).read_text())
        changes = tuple(Change(**entry) for entry in said["changes"])
        return Known(changes=changes, divides_loss=bool(said.get("divides_loss")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_config(args: Any) -> None:
    """The arguments in force, as a YAML that `TrainingArguments(**...)` takes: what differs from the defaults, without credentials."""
    import yaml

    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / CONFIG, yaml.safe_dump(effective_config(args), sort_keys=False, allow_unicode=True))


def effective_config(args: Any) -> dict[str, Any]:
    stated: dict[str, Any] = {}
    for item in dataclasses.fields(args):
        value = _plain(getattr(args, item.name, None))
        default = item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default
        if item.init and value is not None and value != _plain(default) and _writable(value) and not is_secret(item.name, value):
            stated[item.name] = _without_credentials(value)
    return stated


def _without_credentials(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_credentials(entry) for key, entry in value.items() if not is_secret(str(key), entry)}
    return [_without_credentials(entry) for entry in value if not is_secret("", entry)] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Enums as their words, sequences as lists."""
    value = getattr(value, "value", value)
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple, set)) else value


def _writable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _writable(entry) for key, entry in value.items())
    if isinstance(value, list):
        return all(_writable(entry) for entry in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _write(target: Path, text: str) -> None:
    """Whole or not at all."""
    new = target.with_name(f".{target.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(target)
