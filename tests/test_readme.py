"""What the README shows is what the code does: every `$ hfopt …` block is run again and must print the same.

The figures are rows of the table at the top of benchmarks/RESULTS.md, whose sections must state each of them.

The figures of a plan depend on the model code that is traced, so they are compared to the letter with the versions the README names, and
without the figures on others. `HFOPT_UPDATE_README=1 pytest tests/test_readme.py` writes the current output into the README instead.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(r"^```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)^```$", re.M | re.S)
VERSIONS = re.compile(r"torch [\w.+]+ and transformers [\w.]+")
BLOCKS = list(BLOCK.finditer(README.read_text()))
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
FIGURES = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- /figures -->)", re.S)
UPDATE = os.environ.get("HFOPT_UPDATE_README") == "1"


def _shown(command: str, folder: Path) -> str:
    """What a terminal without colours would show: the words for people, then what is not redirected away."""
    (folder / "configs").symlink_to(ROOT / "configs")
    words, _, target = command.partition(" > ")
    arguments = shlex.split(words)
    assert arguments[0] == "hfopt"
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    two_cores = set(sorted(os.sched_getaffinity(0))[:2])  # the plan for the data loader depends on the cores
    with (folder / (target or "stdout")).open("w+") as stdout:
        result = subprocess.run(
            [sys.executable, "-m", "hfopt", *arguments[1:]],
            cwd=folder,
            env=environment,
            stdout=stdout if target else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            preexec_fn=lambda: os.sched_setaffinity(0, two_cores),
        )
    assert "Traceback" not in result.stderr
    return "".join(f"{line.rstrip()}\n" for line in (result.stderr + (result.stdout or "")).splitlines())


def test_the_readme_shows_commands() -> None:
    assert len(BLOCKS) >= 3


def _at_a_glance() -> tuple[str, str]:
    """The table, and all that follows it."""
    text = RESULTS.read_text().partition("## At a glance\n")[2]
    table = "".join(f"{line}\n" for line in text.partition("\n## ")[0].splitlines() if line.startswith("|"))
    return table, text.partition("\n## ")[2]


def test_the_figures_are_those_of_the_results() -> None:
    table, _ = _at_a_glance()
    rows = {row.split("|")[1]: row for row in table.splitlines(keepends=True)}
    (shown,) = FIGURES.findall(README.read_text())
    taken = "".join(rows.get(row.split("|")[1], row) for row in shown.splitlines(keepends=True))
    if UPDATE:
        README.write_text(FIGURES.sub(lambda _: taken, README.read_text()))
    assert set(shown.splitlines()) <= set(table.splitlines()), "HFOPT_UPDATE_README=1 pytest tests/test_readme.py takes them over"
    assert len(shown.splitlines()) == 2 + 5, "a head and five rows: the rest stands in RESULTS"


def test_every_figure_at_a_glance_is_stated_where_it_was_measured() -> None:
    table, sections = _at_a_glance()
    cells = [cell for row in table.splitlines()[2:] for cell in row.split("|")[2:4]]
    figures = [figure for cell in cells for figure in re.findall(r"\d[\d.,]*\d|\d", cell)]
    assert len(figures) > 10
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d]|[.,]\d)", sections), f"{figure} stands in no section of RESULTS.md"


def _first_line_without_figures(text: str) -> str:
    return re.sub(r"[\d.,]+", "#", text.splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["command"][:60])
def test_the_readme_is_not_stale(block: re.Match[str], tmp_path: Path) -> None:
    shown, installed = _shown(block["command"], tmp_path), f"torch {version('torch')} and transformers {version('transformers')}"
    if UPDATE:
        text = README.read_text().replace(block[0], f"```console\n$ {block['command']}\n{shown}```")
        README.write_text(VERSIONS.sub(installed, text))
    elif installed in README.read_text():
        assert shown == block["output"], "HFOPT_UPDATE_README=1 pytest tests/test_readme.py writes the current output"
    else:
        assert _first_line_without_figures(shown) == _first_line_without_figures(block["output"])
