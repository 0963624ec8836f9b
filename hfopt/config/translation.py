"""A file of another tool in the words of TrainingArguments: judged, read and written back by the same rules as a file of our own.

A tool's module (`axolotl`) says what its file means; here the values are compared with the installed TrainingArguments, each finding under
the key that the file has, and the job is put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfopt.config.argument_values import judge
from hfopt.config.other_tools import ToolSpelling
from hfopt.config.training_arguments import ACCUMULATION, BATCH
from hfopt.config.validate import nearest
from hfopt.config.yaml_document import Document
from hfopt.facts.training_keys import Installed
from hfopt.redact import is_secret
from hfopt.schema import Problem, TrainerKind

_CONVERTED = frozenset({"number_as_string", "bool_as_string"})  # their readers convert text by the field's type
_FOREIGN = frozenset({"unknown_value", "none_as_string", "removed_value"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Clash:
    """What the tool refuses to start with."""

    key: str
    message: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    tool: str
    args: Mapping[str, Any]  # by the names of TrainingArguments, with the tool's defaults
    spellings: Mapping[str, ToolSpelling]  # where each argument stands, or would be written
    facts: Mapping[str, Any]  # model and data in the words of TRL's scripts
    trainer: TrainerKind
    uses_trl: bool = False
    unwritable: frozenset[str] = frozenset()  # arguments the tool has no key for
    float32_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    clashes: tuple[Clash, ...] = ()
    read_keys: frozenset[str] = field(default_factory=frozenset)  # of the tool, that a misspelt one may stand for


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    args: Mapping[str, Any]
    problems: tuple[Problem, ...]


def judge_translation(made: Translation, document: Document, present: Installed) -> Judged:
    """The usable arguments, and what is wrong with the file under its own keys."""
    args: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in made.args.items():
        known = present.fields.get(name)
        if known is None:
            continue
        spelling = made.spellings.get(name)
        written = name if spelling is None else spelling.key
        verdict = judge(name, value, known)
        if verdict.usable is not None and not is_secret(written, verdict.usable):
            args[name] = verdict.usable
        if verdict.code is None or verdict.code in _CONVERTED or (verdict.code in _FOREIGN and name not in (BATCH, ACCUMULATION)):
            continue
        if document.root.find(written) is not None:
            message = verdict.message.replace(name, written)
            fix = verdict.fix and verdict.fix.replace(name, written)
            problems.append(_problem(document, written, verdict.severity, verdict.code, message, fix))
    problems += [_problem(document, clash.key, "error", "conflict", clash.message, clash.fix) for clash in made.clashes]
    problems += _misspelt(made, document, present)
    return Judged(args=args, problems=tuple(problems))


def _misspelt(made: Translation, document: Document, present: Installed) -> Iterator[Problem]:
    keys = [entry.key for entry in document.root.entries if entry.key]
    absent = made.read_keys - set(keys)
    for key in keys:
        if key in made.read_keys or key in present.fields:
            continue
        near = nearest(key, absent)
        if near is not None:
            message = f"{key} is not a key that {made.tool} is known to read"
            yield _problem(document, key, "warning", "unknown_key", message, f"did you mean {near}?")


def _problem(document: Document, key: str, severity: Any, code: str, message: str, fix: str | None) -> Problem:
    entry = document.root.find(key)
    place = document.place(entry.key_start if entry is not None else 0)
    return Problem(severity=severity, code=code, key=key, place=place, message=message, fix=fix)
