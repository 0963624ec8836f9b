"""Findings of `hfopt check` for machines that show them beside the line: GitHub's workflow commands, and SARIF for code scanning.

GitHub: `::error file=…,line=…,col=…,title=…::message`, with %, line ends, and in properties colons and commas, as percent codes
(docs.github.com, "Workflow commands for GitHub Actions"; actions/toolkit, packages/core/src/command.ts). SARIF: version 2.1.0 as OASIS has
it, one run, one rule per code, columns counted from one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from hfopt.redact import json_words, printable, said
from hfopt.schema import Problem

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
Finding = tuple[str, Problem]
"""The file as it was named, and what was found in it."""


def github_annotations(findings: Iterable[Finding]) -> str:
    """A line for each finding, as a step of a workflow prints it."""
    return "".join(_github_line(path, problem) for path, problem in findings)


def sarif(findings: Sequence[Finding], *, version: str) -> str:
    """All findings as one log."""
    codes = sorted({problem.code for _, problem in findings})
    driver = {
        "name": "hfopt check",
        "version": version,
        "rules": [{"id": code, "shortDescription": {"text": code.replace("_", " ")}} for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(path, problem, codes.index(problem.code)) for path, problem in findings],
    }
    return json_words(json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False)) + "\n"


def _message(problem: Problem) -> str:
    return said(problem.message if problem.fix is None else f"{problem.message}\nfix: {problem.fix}")


def _github_line(path: str, problem: Problem) -> str:
    place = problem.place
    where = {"file": path} | ({} if place is None else {"line": str(place.line), "col": str(place.column)})
    properties = ",".join(f"{name}={_property(value)}" for name, value in {**where, "title": f"hfopt: {problem.code}"}.items())
    return f"::{_LEVELS[problem.severity]} {properties}::{_data(_message(problem))}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(printable(text)).replace(":", "%3A").replace(",", "%2C")


def _result(path: str, problem: Problem, rule: int) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": {"uri": quote(PurePath(path).as_posix())}}
    if problem.place is not None:
        location["region"] = {"startLine": problem.place.line, "startColumn": problem.place.column}
    return {
        "ruleId": problem.code,
        "ruleIndex": rule,
        "level": problem.severity,
        "message": {"text": _message(problem)},
        "locations": [{"physicalLocation": location}],
    }
