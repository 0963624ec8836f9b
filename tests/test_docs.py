"""The documents are true of the code: messages they quote exist, links lead somewhere, every key is named."""

from __future__ import annotations

import re
from pathlib import Path

import module_tree
import pytest

from hfopt.facts.training_keys import PRECISION_KEYS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


def test_quoted_messages_are_those_of_the_code() -> None:
    source = "\n".join(path.read_text() for path in ROOT.glob("hfopt/**/*.py"))
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    quoted = [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 15
    for words in quoted:
        for piece in re.split(r"…|\.\.\.", words):
            assert piece.strip() in source, f"docs/troubleshooting.md quotes {piece.strip()!r}, which the code does not say"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


OF_OTHERS = {"run_clm.py", "file.py", "path/to/file.py"}
OF_TODAY = [path for path in DOCUMENTS if path.name not in ("comparison.md", "CHANGELOG.md") and path.parent.name != "notes"]
"""Not: what names modules of other projects, and what tells how it was then."""


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_are_named_are_there(document: Path) -> None:
    """`search.py` or `planner/search.py`, with or without what is in it."""
    there = [f"/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py")]
    named = set(re.findall(r"`([\w/.-]+\.py)\b", document.read_text())) - OF_OTHERS
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set()


def test_every_document_is_linked_from_the_front() -> None:
    front = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for document in ROOT.glob("docs/*.md"):
        assert f"(docs/{document.name})" in front, document.name


def test_every_key_the_planner_may_touch_is_documented() -> None:
    source = (ROOT / "hfopt" / "planner" / "changes.py").read_text()
    touched = set(re.findall(r'yield "(\w+)"', source)) | set(PRECISION_KEYS)
    assert len(touched) > 8
    assert touched <= set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "planner.md").read_text(), re.M))


def test_each_feature_of_the_virtual_gpu_names_a_test_that_exists() -> None:
    table = (ROOT / "docs" / "virtual_gpu.md").read_text().partition("| feature |")[2].partition("\n\n")[0]
    rows = [re.findall(r"[^|]+", line) for line in table.splitlines()[2:]]
    assert len(rows) > 15
    for feature, answer, tests in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
        assert named or answer.strip() == "not modelled", f"{feature.strip()} names no test"
        for file, name in named:
            assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.M), f"tests/{file} has no {name}"


def test_the_tree_of_the_architecture_is_that_of_today() -> None:
    text = module_tree.DOCUMENT.read_text(encoding="utf-8")
    assert text == module_tree.written(text), "run python tests/support/module_tree.py"
