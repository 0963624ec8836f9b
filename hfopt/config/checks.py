"""What is wrong or outdated in a section, key by key: each finding with its place, and the repair where one is certain."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hfopt.config.dialects import Dialect
from hfopt.config.document import Document, Entry
from hfopt.config.keys import ACCUMULATION, ALIASES, BATCH, GONE, NEWER, QUIET_ALIASES, Gone, known_elsewhere
from hfopt.config.operations import Operation
from hfopt.config.render import render
from hfopt.config.sections import Section
from hfopt.config.values import Severity, Verdict, judge
from hfopt.facts.training_keys import Field, Installed
from hfopt.redact import HIDDEN, is_secret, shown
from hfopt.schema import Problem

_EXACT_SECTIONS = frozenset(["training_args", "trainingarguments", "training_arguments", "trainer_args", "seq2seqtrainingarguments"])

_FOREIGN_VALUE = frozenset({"wrong_type", "unknown_value", "removed_value", "unresolved", "none_as_string"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A finding; `repair` is what `--upgrade` does about it."""

    problem: Problem
    repair: tuple[Operation, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What a section came to: its arguments under their current names, where each stands, and the findings."""

    args: Mapping[str, Any]
    found: tuple[Found, ...]


class SectionReader:
    """Reads one section of a document, as the tool reads it whose dialect it is in."""

    def __init__(self, document: Document, section: Section, present: Installed, dialect: Dialect) -> None:
        self.document, self.section, self.present = document, section, present
        self.values: dict[str, Any] = document.value(section.path)
        self.dialect = dialect
        self.args: dict[str, Any] = {}
        self.found: list[Found] = []

    def read(self) -> Read:
        for key, value in self.values.items():
            if isinstance(key, str):
                self._read_key(key, value)
        self.found.extend(self._duplicates())
        return Read(args=self.args, found=tuple(self.found))

    def _field(self, key: str) -> Field | None:
        return self.present.fields.get(key) or self.present.seq2seq.get(key)

    def _read_key(self, key: str, value: Any) -> None:
        field = self._field(key)
        if field is not None:
            self._take(key, key, self._judge(key, key, value, field))
        elif key in self.dialect.still_takes:
            message = f"{key} does nothing any more; {self.dialect.name} still takes it"
            self._say(key, "removed_key", "note", message, "drop the line", (Operation(path=self.section.path, key=key, remove=True),))
        elif key in GONE:
            self._read_gone(key, value, GONE[key])
        elif self.section.keys.get(ALIASES.get(key, "")) == key:
            self._read_alias(key, value)
        elif key in NEWER:
            hint = f"in {self.present.version}: {NEWER[key]}" if NEWER[key] else "drop it, or upgrade transformers"
            self._say(key, "newer_key", "error", f"{key} is newer than the installed transformers {self.present.version}", hint)
        elif key not in known_elsewhere() and not isinstance(value, dict):
            self._read_unknown(key, value)

    def _take(self, key: str, written: str, verdict: Verdict) -> None:
        if is_secret(written, verdict.usable):
            message = f"{written} is written out in the file: whoever has the file has the account"
            self._say(written, "secret", "warning", message, "drop the line and run `hf auth login`, or set HF_TOKEN")
        elif verdict.usable is not None:
            self.args[key] = verdict.usable

    def _judge(self, key: str, written: str, value: Any, field: Field) -> Verdict:
        value = resolve(value, self.document.data)
        verdict = judge(key, value, field)
        cost = self.dialect.text_costs.get(verdict.code or "")
        if cost is not None and isinstance(value, str):
            verdict = replace(
                verdict, severity=cost, message=f"{verdict.message}; {self.dialect.name} converts it, HfArgumentParser does not"
            )
        if verdict.code is not None:
            repair = (Operation(path=self.section.path, key=written, after=verdict.usable),) if verdict.repair else ()
            self._say(
                written,
                verdict.code,
                verdict.severity,
                verdict.message.replace(key, written, 1),
                verdict.fix and verdict.fix.replace(key, written, 1),
                repair,
            )
        return verdict

    def _read_alias(self, key: str, value: Any) -> None:
        """A script's own name for an argument. Its values may be the script's own too (`optimizer: AdamW`): those are none of ours."""
        real = ALIASES[key]
        field = self._field(real)
        if field is None:
            return
        foreign = judge(real, resolve(value, self.document.data), field).code in _FOREIGN_VALUE
        if foreign and real not in (BATCH, ACCUMULATION):
            return
        verdict = self._judge(real, key, value, field)
        self._take(real, key, verdict)
        if key not in QUIET_ALIASES and verdict.usable is not None:
            self._say(key, "alias", "note", f"{key} is read as {real}", None)

    def _read_gone(self, key: str, value: Any, gone: Gone) -> None:
        """A key of an older transformers: dropped, renamed, moved into a mapping, or left to the user."""
        target = gone.to if gone.to is not None and self._field(gone.to) is not None else None
        new = value if gone.values is None else gone.values.get(value) if isinstance(value, bool) else None
        taken = target is not None and self._already(target, key)
        cannot_say = key == "warmup_ratio" and isinstance(new, int | float) and not isinstance(new, bool) and new >= 1
        if gone.by_hand or (gone.to is not None and target is None) or (gone.inside is not None and taken) or cannot_say:
            self._say_gone(key, gone, "removed_key", None)
        elif target is None or new is None or taken:
            drop = Operation(path=self.section.path, key=key, remove=True)
            self._say_gone(key, gone, "removed_key", f"drop the line; {target} is set already" if taken else "drop the line", drop)
        elif gone.inside is not None:
            self.args[target] = {gone.inside: value}
            move = Operation(path=self.section.path, key=key, rename_to=target, after={gone.inside: value})
            self._say_gone(key, gone, "renamed_key", f"{target}: {{{gone.inside}: {shown(key, value)}}}", move)
        else:
            self._rename(key, value, new, target, gone)

    def _rename(self, key: str, value: Any, new: Any, target: str, gone: Gone) -> None:
        field = self._field(target)
        assert field is not None
        verdict = judge(target, resolve(new, self.document.data), field)
        self._take(target, key, verdict)
        if verdict.code is not None and not verdict.repair:
            self._say(key, verdict.code, verdict.severity, verdict.message.replace(target, key, 1), verdict.fix)
        after = verdict.usable if verdict.repair else new
        drop = [Operation(path=self.section.path, key=target, remove=True)] if target in self.values else []
        rename = Operation(path=self.section.path, key=key, rename_to=target, after=after, keep_value=after is value)
        self._say_gone(key, gone, "renamed_key", f"{target}: {_brief(target, after)}", *drop, rename)

    def _say_gone(self, key: str, gone: Gone, code: str, fix: str | None, *repair: Operation) -> None:
        self._say(key, code, "error", f"{key} is gone from transformers {self.present.version}: {gone.why}", fix, repair)

    def _already(self, target: str, key: str) -> bool:
        """The successor is set too. warmup_steps: 0 does not count: v4 took the ratio then."""
        return target in self.values and not (key == "warmup_ratio" and self.values[target] in (0, None))

    def _read_unknown(self, key: str, value: Any) -> None:
        near = nearest(key, (name for name in (*self.present.fields, *GONE, *ALIASES) if name not in self.values))
        while near is not None and near not in self.present.fields:  # a misspelt old name or alias: the real key is meant
            near = ALIASES.get(near) or GONE[near].to if near in ALIASES or near in GONE else None
        if near in self.values:
            near = None
        field = self._field(near or "")
        if field is not None and near is not None and judge(near, value, field).code == "wrong_type":
            near = None  # `seeds: [1, 2]` is not a misspelt seed
        exact = bool(self.section.path) and self.section.path[-1].lower() in _EXACT_SECTIONS
        if near is not None:
            self._say(key, "unknown_key", "warning", f"{key} is not a key of TrainingArguments", f"did you mean {near}?")
        elif exact:
            message = f"{key} is not a key of TrainingArguments, which refuses keys it does not know"
            self._say(key, "unknown_key", "warning", message, "move it to a section of its own")

    def _duplicates(self) -> Iterator[Found]:
        seen: dict[str, Entry] = {}
        for entry in self.section.node.entries:
            if entry.key and entry.key in seen and not entry.merge:
                first = self.document.place(seen[entry.key].key_start)
                message = f"{entry.key} is set twice, first in line {first.line}; the last one wins"
                place = self.document.place(entry.key_start)
                yield Found(
                    problem=Problem(severity="warning", code="duplicate_key", key=entry.key, place=place, message=message, fix="drop one")
                )
            seen[entry.key] = entry

    def _say(self, key: str, code: str, severity: Severity, message: str, fix: str | None, repair: tuple[Operation, ...] = ()) -> None:
        definer = self.section.node.definer(key)
        entry = definer.find(key) if definer is not None else None
        place = self.document.place(entry.key_start if entry is not None else self.section.node.start)
        problem = Problem(severity=severity, code=code, key=key, place=place, message=message, fix=fix)
        self.found.append(Found(problem=problem, repair=repair))


def resolve(value: Any, data: dict[str, Any], depth: int = 0) -> Any:
    """`${a.b}` (OmegaConf) by the value it names in the same file; anything else as it is."""
    if not (isinstance(value, str) and value.startswith("${") and value.endswith("}") and ":" not in value) or depth > 5:
        return value
    target: Any = data
    for part in value[2:-1].strip(". ").split("."):
        target = target.get(part) if isinstance(target, dict) else None
    return value if target is None or isinstance(target, dict | list) else resolve(target, data, depth + 1)


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """A key it may be a misspelling of: nearly all letters agree. `eval_epochs` is not `eval_steps`."""
    said = key.lower().replace("-", "_")
    pairs = _pairs(said)
    possible = [name for name in candidates if 2 * len(pairs & _pairs(name)) >= max(len(pairs), len(_pairs(name)))]
    close = difflib.get_close_matches(said, possible, n=1, cutoff=0.87)
    return close[0] if close else None


@cache
def _pairs(text: str) -> frozenset[str]:
    """Its neighbouring letters: a cheap sieve before the exact comparison."""
    return frozenset(text[position : position + 2] for position in range(len(text) - 1))


def _brief(key: str, value: Any) -> str:
    return HIDDEN if is_secret(key, value) else render(value)
