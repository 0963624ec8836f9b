"""A plan in a notebook: one table with every change, and nothing in it that the page would take for markup."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

from hfopt.report.one_screen import plan_html, plan_markdown, rows
from hfopt.schema import PlanFacts


class Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_every_change_has_a_row(facts: PlanFacts) -> None:
    change = replace(facts.changes[0], before="a|b", after="<script>", reason="x & y")
    facts = replace(facts, changes=(change,))
    page = Cells()
    page.feed(plan_html(facts))
    assert [tuple(row) for row in page.rows[1:]] == list(rows(facts))
    assert page.rows[1] == [change.key, "a|b", "<script>", "x & y"]
    text = plan_markdown(facts)
    assert f"| {change.key} | a\\|b | &lt;script> | x & y |" in text
    assert len(text.splitlines()) == len(list(rows(facts))) + 4, "title, empty line, head and rule"


def test_a_plan_that_changes_nothing_says_so(facts: PlanFacts) -> None:
    assert "already the fastest that fit" in plan_html(replace(facts, changes=()))
