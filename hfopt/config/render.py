"""A Python value as YAML text that PyYAML's safe loader reads back as exactly that value, in the style of what stood there."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml

from hfopt.config.values import spelled_float


def render(value: Any, *, old: str = "", json_style: bool = False) -> str:
    """One line of text for `value`. `old` is the source text it replaces: its quotes, capitals and digits are kept where they can be."""
    if json_style:
        return json.dumps(value, ensure_ascii=False)
    match value:
        case None:
            return "null"
        case bool():
            return _bool(value, old)
        case int():
            return str(value)
        case float():
            return _float(value, old)
        case str():
            return _string(value, old)
        case list() | tuple():
            return "[" + ", ".join(render(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{render(key)}: {render(item)}" for key, item in value.items()) + "}"
        case _:
            return _string(str(value), old)


def _bool(value: bool, old: str) -> str:
    word = "true" if value else "false"
    text = old.strip()
    if text in ("True", "False"):
        return word.capitalize()
    if text in ("TRUE", "FALSE"):
        return word.upper()
    pairs = {"yes": ("yes", "no"), "no": ("yes", "no"), "on": ("on", "off"), "off": ("on", "off")}
    if text.lower() in pairs:
        chosen = pairs[text.lower()][0 if value else 1]
        return chosen.capitalize() if text[:1].isupper() else chosen
    return word


def _float(value: float, old: str) -> str:
    if not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return spelled_float(old.strip().strip("'\""), value)


def _string(value: str, old: str) -> str:
    quote = old.strip()[:1]
    if quote == "'" and _fits_single_quotes(value):
        return "'" + value.replace("'", "''") + "'"
    if quote == '"' or not _fits_plain(value):
        return yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf).rstrip("\n")
    return value


def _fits_single_quotes(value: str) -> bool:
    return value.isprintable()


def _fits_plain(value: str) -> bool:
    """Plain text that is one word to YAML, within brackets too, and stays a string; anything doubtful is quoted."""
    if not re.fullmatch(r"[A-Za-z0-9_./~][A-Za-z0-9_./~+\-@]*(?: [A-Za-z0-9_./+\-@]+)*", value):
        return False
    try:
        return bool(yaml.safe_load(value) == value)
    except (yaml.YAMLError, ValueError):
        return False
