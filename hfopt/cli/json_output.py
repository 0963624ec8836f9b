"""`--json`: one answer on stdout, errors among them, each of a shape that `hfopt schema` states.

`--json` and `--json -` mean the same for every command. Whether it was asked for is read from the words themselves, because the command
line may be what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfopt.cli.output import answer
from hfopt.errors import HfoptError
from hfopt.redact import json_words, said

if TYPE_CHECKING:
    from hfopt.schema.outputs import ErrorDetail, ErrorPlace

VERSIONS = {
    # raised when a key goes, or changes its meaning or type; a new key raises nothing
    "error": 1,
    "check": 1,
    "estimate": 1,
    "plan": 1,
    "compare": 1,
    "explain": 1,
    "diff": 1,
    "calibrate": 1,
    "rehearse": 1,
    "report": 1,
    "gpus": 1,
    "cache": 1,
    "doctor": 1,
}
SCHEMA = "schema"  # the key by which an object names its schema; a list has none
STDOUT = "-"
FLAG = "--json"
_READS_STDIN = ("check", "explain")  # where a lone - is the file
_PLACE = re.compile(r"(?::(?P<line>\d+))?(?::(?P<column>\d+))?: ")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def schema_name(name: str) -> str:
    """'hfopt/plan/1'."""
    return f"hfopt/{name}/{VERSIONS[name]}"


def json_text(name: str, output: object) -> str:
    """One of the outputs that `hfopt schema` lists, as it is printed."""
    from hfopt.store import plain

    data = plain(output)
    if isinstance(data, dict):
        data = {SCHEMA: schema_name(name), **data}
    return json_words(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def answer_json(name: str, output: object) -> None:
    answer(json_text(name, output))


# --------------------------------------------------------------------------------------------------------------- errors


def error_detail(error: HfoptError, words: Sequence[str] = (), *, kind: str | None = None) -> ErrorDetail:
    """`words` are the command line: a file among them that the message begins with is where it is."""
    what, hint = said(str(error)), error.hint
    return {
        "kind": kind or type(error).__name__,
        "what": what,
        "where": _where(what, words),
        "fix": None if hint is None else said(hint),
        "exit_code": error.exit_code,
    }


def _where(what: str, words: Sequence[str]) -> ErrorPlace | None:
    """A message begins with its file and place, or names an option or what was given for one."""
    given = [word for word in words[1:] if not word.startswith("-")]
    files = [word for word in (*given, "<stdin>", "standard input") if what.startswith(f"{word}:")]
    if files:
        path = max(files, key=len)
        place = _PLACE.match(what, len(path))
        line, column = (None, None) if place is None else (place["line"], place["column"])
        return _place(path=path, line=line and int(line), column=column and int(column))
    if (option := _OPTION.search(what)) is not None:
        return _place(option=option[0])
    named = [word for word in given if re.search(rf"(?<![\w./-]){re.escape(word)}(?![\w/-])", what)]
    if not named:
        return None
    word = max(named, key=len)
    before = words[words.index(word) - 1]
    return _place(argument=word, option=before if before.startswith("--") and before != FLAG else None)


def _place(
    *, path: str | None = None, line: Any = None, column: Any = None, option: str | None = None, argument: str | None = None
) -> ErrorPlace:
    return {"path": path, "line": line, "column": column, "option": option, "argument": argument}


def answer_error(error: HfoptError, words: Sequence[str], *, kind: str | None = None) -> None:
    answer_json("error", {"error": error_detail(error, words, kind=kind)})


# ------------------------------------------------------------------------------------------------------- the command line


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandLine:
    """The words behind `hfopt`, and what its command takes."""

    words: tuple[str, ...]
    flags: frozenset[str]  # its options that take no value
    takes_json: bool
    interspersed: bool = True  # options may stand behind the first word that is none

    @property
    def wants_json(self) -> bool:
        """Does its answer go to stdout as JSON?"""
        if not self.takes_json:
            return False
        own = self._own
        if FLAG in self.flags:
            return FLAG in own
        return f"{FLAG}={STDOUT}" in own or any(own[place : place + 2] == (FLAG, STDOUT) for place in range(len(own)))

    def in_one_form(self) -> CommandLine:
        """`--json -` becomes `--json` where that is a flag, and the reverse where it takes a file."""
        if not self.takes_json or FLAG not in self._own:
            return self
        place = self.words.index(FLAG)
        before, behind = self.words[: place + 1], self.words[place + 1 :]
        if FLAG not in self.flags:
            lacks = not behind or (behind[0].startswith("-") and behind[0] != STDOUT)
            return self._with((*before, STDOUT, *behind)) if lacks else self
        if behind[:1] != (STDOUT,):
            return self
        rest = (*before, *behind[1:])
        is_the_file = self.words[0] in _READS_STDIN and self._first_named(rest[1:]) == len(rest) - 1
        return self if is_the_file else self._with(rest)

    def _with(self, words: tuple[str, ...]) -> CommandLine:
        return CommandLine(words=words, flags=self.flags, takes_json=self.takes_json, interspersed=self.interspersed)

    @property
    def _own(self) -> tuple[str, ...]:
        """The words that are hfopt's: not those behind `--`, nor those of a command that it is to run."""
        own = self.words[: self.words.index("--")] if "--" in self.words else self.words
        return own if self.interspersed else own[: 1 + self._first_named(own[1:])]

    def _first_named(self, words: Sequence[str]) -> int:
        """The place of the first word that is neither an option nor an option's value; behind the last where there is none."""
        place = 0
        while place < len(words) and words[place].startswith("-") and words[place] != STDOUT:
            place += 1 if words[place] in self.flags or "=" in words[place] else 2
        return min(place, len(words))


def command_line(words: Sequence[str], command: Any) -> CommandLine:
    """`command`: the parser's own, None where it is not clear which is meant."""
    options = [] if command is None else [option for option in command.params if option.param_type_name == "option"]
    flags = {name for option in options if option.is_flag for name in (*option.opts, *option.secondary_opts)}
    return CommandLine(
        words=tuple(words),
        flags=frozenset(flags),
        takes_json=any(FLAG in option.opts for option in options),
        interspersed=command is None or command.context_settings.get("allow_interspersed_args", True),
    )
