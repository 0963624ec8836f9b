"""The tutorial and the how-to pages name commands, options and Python names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

import hfopt
from hfopt.cli import COMMANDS, application

ROOT = Path(__file__).parent.parent
PAGES = ("tutorial.md", "howto.md", "teams.md")
PASSED_ON = ("run", "rehearse")
"""What follows their script or `--` is the script's own."""


def mentioned(text: str) -> list[tuple[str, list[str]]]:
    """(command, options) of every `hfopt …` in a code block or between backticks."""
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", text, re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    lines = [line for block in blocks for line in block.splitlines()] + inline
    found = [re.search(r"\bhfopt ([a-z]+)(?= |$)(.*)", line.split("  #")[0]) for line in lines]
    return [(match[1], re.findall(r"(?<=\s)(--?[a-z][a-z-]*)", match[2].partition(" -- ")[0])) for match in found if match]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_option_exists(page: str) -> None:
    found = mentioned((ROOT / "docs" / page).read_text())
    assert len(found) >= 5
    for command, options in found:
        assert command in COMMANDS, f"{page}: hfopt {command}"
        known = {name for parameter in get_command(application([command])).commands[command].params for name in parameter.opts}  # type: ignore[attr-defined]
        for option in options if command not in PASSED_ON else ():
            assert option in known, f"{page}: hfopt {command} {option}"


def test_python_names_exist() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in PAGES)
    names = set(re.findall(r"\bhfopt\.(\w+)\(", text))
    assert names >= {"protect", "HFGpuMonitor"} and all(hasattr(hfopt, name) for name in names)


def test_the_configs_of_the_tutorial_are_there() -> None:
    names = re.findall(r"configs/[\w.]+yaml", (ROOT / "docs" / "tutorial.md").read_text())
    assert names
    for name in names:
        assert (ROOT / name).is_file(), name
