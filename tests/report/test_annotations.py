"""Findings as GitHub and code scanning read them."""

from __future__ import annotations

import json

from hfopt.report.annotations import github_annotations, sarif
from hfopt.schema import Place, Problem

FOUND = Problem(
    severity="error",
    code="removed_key",
    key="evaluation_strategy",
    place=Place(path="a b,c.yaml", line=8, column=3),
    message="100 % gone: renamed",
    fix="eval_strategy: epoch",
)
PLACELESS = Problem(severity="note", code="x", key=None, place=None, message="multi\nline")


def test_a_line_of_a_workflow_escapes_what_would_break_it() -> None:
    first, second = github_annotations([("a b,c.yaml", FOUND), ("d.yaml", PLACELESS)]).splitlines()
    assert first == "::error file=a b%2Cc.yaml,line=8,col=3,title=hfopt%3A removed_key::100 %25 gone: renamed%0Afix: eval_strategy: epoch"
    assert second == "::notice file=d.yaml,title=hfopt%3A x::multi%0Aline"
    (steering,) = github_annotations([("a\x1b[31m\u202e.yaml", PLACELESS)]).splitlines()
    assert steering == "::notice file=a\ufffd[31m\ufffd.yaml,title=hfopt%3A x::multi%0Aline"


def test_sarif_has_a_rule_for_each_code_and_a_place_for_each_finding() -> None:
    log = json.loads(sarif([("a b,c.yaml", FOUND), ("d.yaml", PLACELESS), ("e.yaml", FOUND)], version="1.2"))
    (run,) = log["runs"]
    assert log["version"] == "2.1.0" and run["tool"]["driver"]["version"] == "1.2"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["removed_key", "x"]
    first, second, third = run["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "a%20b%2Cc.yaml"}, "region": {"startLine": 8, "startColumn": 3}}
    assert (first["ruleId"], first["ruleIndex"], first["level"]) == ("removed_key", 0, "error")
    assert "fix: eval_strategy" in first["message"]["text"]
    assert second["level"] == "note" and "region" not in second["locations"][0]["physicalLocation"] and third["ruleIndex"] == 0
    assert json.loads(sarif([], version="1"))["runs"][0]["results"] == []


def test_credentials_are_not_repeated() -> None:
    leaking = Problem(severity="error", code="x", key="hub_token", place=None, message="hub_token is hf_" + "a" * 34)
    assert "hf_aaa" not in github_annotations([("a.yaml", leaking)]) and "hf_aaa" not in sarif([("a.yaml", leaking)], version="1")
