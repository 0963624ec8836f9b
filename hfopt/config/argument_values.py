"""One value against its key: is it what the installed TrainingArguments takes, and what was meant if not.

PyYAML decides the type: `5e-5` is text (a float needs a dot), an unquoted `no` is false, `None` is the text 'None'.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.config.training_arguments import ALSO_TAKES, GONE_VALUES
from hfopt.facts.training_keys import Field
from hfopt.redact import shown

Severity = Literal["error", "warning", "note"]
UNRESOLVED = re.compile(r"\$\{|\{\{|\{%|^<[A-Za-z_ ]+>$|^\$[A-Za-z_]\w*$|^\?\?\?$")  # OmegaConf, jinja, <value>, $VALUE, ???
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_AT_LEAST_ONE = {"per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueVerdict:
    """`usable`: the value as the key wants it, None when there is none (then the default holds)."""

    usable: Any
    code: str | None = None
    severity: Severity = "error"
    message: str = ""
    fix: str | None = None
    repair: bool = False  # writing `usable` into the file is the fix


def judge(key: str, value: Any, field: Field) -> ValueVerdict:
    """The verdict on the value, and on what a repair would make of it."""
    verdict = _judge(key, value, field)
    if verdict.repair:
        repaired = _judge(key, verdict.usable, field)
        return verdict if repaired.code is None else repaired
    return verdict


def _judge(key: str, value: Any, field: Field) -> ValueVerdict:
    kinds = field.kinds | ALSO_TAKES.get(key, frozenset())
    if value is None:
        return _judge_null(key, kinds)
    if key == "gradient_checkpointing" and value == "unsloth":  # its own way to do it; TrainingArguments takes any text for true
        return ValueVerdict(usable=True)
    if isinstance(value, str) and UNRESOLVED.search(value) and (not kinds or not kinds & {"str", "dict"}):
        message = f"{key} is {shown(key, value)}, which only another program can fill in"
        return ValueVerdict(usable=None, code="unresolved", message=message, fix="write the value itself, or resolve the file first")
    if (
        isinstance(value, str)
        and value in ("None", "none", "null")
        and "none" in kinds
        and "none" not in field.choices
        and key != "report_to"
    ):
        return ValueVerdict(
            usable=None, code="none_as_string", severity="warning", message=f"{key} is the text {value!r}, not nothing", fix=f"{key}: null"
        )
    if field.choices and kinds & {"str"}:
        return _judge_choice(key, value, field.choices)
    if kinds & {"int", "float"} and not _is_kind(value, kinds):
        return _judge_number(key, value, kinds)
    if "bool" in kinds and not _is_kind(value, kinds):
        return _judge_bool(key, value)
    if kinds - {"none"} and not _is_kind(value, kinds) and not isinstance(value, int | float):
        return _wrong_type(key, value, kinds)
    if isinstance(value, float) and not math.isfinite(value):
        return ValueVerdict(usable=None, code="bad_value", severity="warning", message=f"{key} is {value}, not a number to train with")
    if key in _AT_LEAST_ONE and isinstance(value, int) and not 1 <= value < 1 << 31:
        return ValueVerdict(
            usable=None, code="bad_value", message=f"{key} is {shown(key, value)}; it must be at least 1 (a number of samples)"
        )
    return ValueVerdict(usable=value)


def _is_kind(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return bool(kinds & {"int", "float"})
    names: tuple[tuple[type, str], ...] = ((float, "float"), (str, "str"), (dict, "dict"), (list, "list"))
    return any(isinstance(value, kind) and name in kinds for kind, name in names)


def _judge_null(key: str, kinds: frozenset[str]) -> ValueVerdict:
    if not kinds or "none" in kinds:
        return ValueVerdict(usable=None)
    if kinds & {"int", "float"} and "bool" not in kinds:
        return ValueVerdict(
            usable=None, code="null_value", message=f"{key} is null, but a number is needed", fix="write a number, or drop the line"
        )
    return ValueVerdict(
        usable=None, code="null_value", severity="note", message=f"{key} is null; the default was probably meant", fix="drop the line"
    )


def _judge_number(key: str, value: Any, kinds: frozenset[str]) -> ValueVerdict:
    wanted = "a whole number" if "float" not in kinds else "a number"
    if isinstance(value, str):
        number = _number(value)
        if number is None or ("float" not in kinds and not float(number).is_integer()):
            return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is the text {shown(key, value)}, but {wanted} is needed")
        usable: int | float = number if "float" in kinds else int(number)
        message = f"{key} is the text {value!r} to PyYAML, not a number" + (" (a float needs a dot)" if "e" in value.lower() else "")
        return ValueVerdict(usable=usable, code="number_as_string", message=message, fix=f"{key}: {_spelled(value, usable)}", repair=True)
    if isinstance(value, float) and value.is_integer():
        message = f"{key} is {value}, but {wanted} is needed"
        return ValueVerdict(
            usable=int(value), code="wrong_type", severity="warning", message=message, fix=f"{key}: {int(value)}", repair=True
        )
    return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is {shown(key, value)}, but {wanted} is needed")


def _judge_bool(key: str, value: Any) -> ValueVerdict:
    word = str(value).lower()
    if isinstance(value, str | int) and word in _TRUE | _FALSE:
        usable = word in _TRUE
        text = f"{key} is {shown(key, value)}, not true or false" + ("; any text counts as true" if isinstance(value, str) else "")
        severity: Severity = "error" if isinstance(value, str) and not usable else "warning"
        return ValueVerdict(
            usable=usable, code="bool_as_string", severity=severity, message=text, fix=f"{key}: {word_of(usable)}", repair=True
        )
    return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is {shown(key, value)}, but true or false is needed")


def _judge_choice(key: str, value: Any, choices: tuple[str, ...]) -> ValueVerdict:
    if isinstance(value, bool) and "no" in choices:
        message = f"{key} is {word_of(value)}: YAML reads an unquoted no, off, yes or on as a truth value"
        usable = None if value else "no"
        return ValueVerdict(
            usable=usable, code="bool_as_string", message=message, fix=f'{key}: "no"' if not value else None, repair=not value
        )
    if isinstance(value, str) and value not in choices:
        replacement = GONE_VALUES.get(key, {}).get(value)
        if replacement in choices:
            message = f"{key}: {value} is gone from the installed transformers"
            return ValueVerdict(usable=replacement, code="removed_value", message=message, fix=f"{key}: {replacement}", repair=True)
        if UNRESOLVED.search(value):
            return ValueVerdict(
                usable=None, code="unresolved", severity="warning", message=f"{key} is {shown(key, value)}, to be filled in elsewhere"
            )
        near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.6)
        fix = f"{key}: {near[0]}" if near else f"one of {', '.join(choices[:8])}{', ...' if len(choices) > 8 else ''}"
        return ValueVerdict(
            usable=None, code="unknown_value", message=f"{key} is {shown(key, value)}, which TrainingArguments does not know", fix=fix
        )
    if not isinstance(value, str):
        return ValueVerdict(usable=value if isinstance(value, list) else None)
    return ValueVerdict(usable=value)


def _wrong_type(key: str, value: Any, kinds: frozenset[str]) -> ValueVerdict:
    words = {"str": "text", "dict": "a mapping", "list": "a list", "bool": "true or false"}
    wanted = " or ".join(words[kind] for kind in sorted(kinds) if kind in words)
    kind = words.get(type(value).__name__, type(value).__name__)
    return ValueVerdict(usable=None, code="wrong_type", severity="warning", message=f"{key} is {kind}, but {wanted} is needed")


def _number(text: str) -> int | float | None:
    text = text.strip().replace("_", "")
    if len(text) > 60:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def spelled_float(text: str, number: float) -> str:
    """A float as PyYAML reads it, in the writer's own digits where they can stay: 5e-5 -> 5.0e-5."""
    match = re.fullmatch(r"([-+]?\d+)(\.\d*)?[eE]([-+]?)(\d+)", text.strip())
    if match is not None and float(text) == number:
        return f"{match[1]}{match[2] if match[2] and match[2] != '.' else '.0'}e{match[3] or '+'}{match[4]}"
    written = repr(number)
    return spelled_float(written, number) if "e" in written else written


def _spelled(text: str, number: int | float) -> str:
    return spelled_float(text, number) if isinstance(number, float) else str(number)


def word_of(value: bool) -> str:
    return "true" if value else "false"


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and true are three different things in a config, and nan is nan."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))
