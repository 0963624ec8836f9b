"""What the README shows is what the code does: every `$ hfopt …` block is run again and must print the same.

The figures depend on the model code that is traced, so they are compared to the letter with the versions the README names, and without the
figures on others. `HFOPT_UPDATE_README=1 pytest tests/test_readme.py` writes the current output into the README instead.
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


def _shown(command: str) -> str:
    """What a terminal without colours would show: the words for people, then what is not redirected away."""
    words, _, target = command.partition(" > ")
    arguments = shlex.split(words)
    assert arguments[0] == "hfopt"
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    two_cores = set(sorted(os.sched_getaffinity(0))[:2])  # the plan for the data loader depends on the cores
    result = subprocess.run(
        [sys.executable, "-m", "hfopt", *arguments[1:]],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: os.sched_setaffinity(0, two_cores),
    )
    assert "Traceback" not in result.stderr
    return "".join(f"{line.rstrip()}\n" for line in (result.stderr + ("" if target else result.stdout)).splitlines())


def test_the_readme_shows_commands() -> None:
    assert len(BLOCKS) >= 3


def _first_line_without_figures(text: str) -> str:
    return re.sub(r"[\d.,]+", "#", text.splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["command"][:60])
def test_the_readme_is_not_stale(block: re.Match[str]) -> None:
    shown, installed = _shown(block["command"]), f"torch {version('torch')} and transformers {version('transformers')}"
    if os.environ.get("HFOPT_UPDATE_README") == "1":
        text = README.read_text().replace(block[0], f"```console\n$ {block['command']}\n{shown}```")
        README.write_text(VERSIONS.sub(installed, text))
    elif installed in README.read_text():
        assert shown == block["output"], "HFOPT_UPDATE_README=1 pytest tests/test_readme.py writes the current output"
    else:
        assert _first_line_without_figures(shown) == _first_line_without_figures(block["output"])
