"""Every command explains itself with examples that parse; only the one that is asked for is loaded; shells complete."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hfopt
from hfopt.cli import COMMANDS, COMPLETING, application

EXAMPLE = re.compile(r"^ {4}(?:.*\| |\S+=\S+ )?(hfopt .*?)(?: {2,}.*| \| .*| > .*)?$", re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help_and_a_line_in_the_list(command: str) -> None:
    own = CliRunner().invoke(application([command]), [command, "--help"])
    assert own.exit_code == 0 and "Usage:" in own.output and len(own.output.splitlines()) > 5
    listed = CliRunner().invoke(application(["--help"]), ["--help"]).output
    (line,) = (line for line in listed.splitlines() if line.split()[:1] == [command])
    assert len(line.split()) > 3 and not line.endswith("...")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_a_command_parse(command: str) -> None:
    shown = CliRunner().invoke(application([command]), [command, "--help"]).output.partition("Examples:")[2].partition("\n\n")[0]
    examples = [shlex.split(line) for line in EXAMPLE.findall(shown)]
    assert len(examples) >= 3
    click_command = _commands([command])[command]
    for words in examples:
        assert words[:2] == ["hfopt", command]
        click_command.make_context(command, words[2:], resilient_parsing=False)


def _commands(words: list[str]) -> Any:
    return typer.main.get_command(application(words)).commands  # type: ignore[attr-defined]


def test_options_are_read_wherever_a_command_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of commands leaves them out, which is most of its time."""
    assert not any(command.params for command in _commands(["--help"]).values())
    for words in ([], ["plan", "--help"], ["--", "plan"], ["--version", "plan"], ["plann"]):
        assert "gpu" in {option.name for option in _commands(words)["plan"].params}, words
    monkeypatch.setenv(COMPLETING, "complete_bash")
    assert "gpu" in {option.name for option in _commands(["--help"])["plan"].params}


@pytest.mark.skipif(
    "suggest_commands" not in inspect.signature(typer.Typer).parameters, reason="this typer does not suggest commands; 0.20 does"
)
def test_a_typo_is_told_the_nearest_command() -> None:
    result = CliRunner().invoke(application(["gpu"]), ["gpu"])
    assert result.exit_code == 2 and "gpus" in result.output


def test_the_version() -> None:
    assert CliRunner().invoke(application(["--version"]), ["--version"]).stdout == f"hfopt {hfopt.__version__}\n"


def test_it_goes_by_one_name_however_it_is_started() -> None:
    shown = subprocess.run([sys.executable, "-m", "hfopt", "gpus", "--help"], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("Usage: hfopt gpus ")


def test_only_the_command_that_is_run_is_loaded() -> None:
    code = (
        "import sys; from hfopt.cli import application; application(['watch', 'out'])\n"
        "print(sorted(name for name in sys.modules if name.startswith('hfopt.cli.')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['hfopt.cli.json_output', 'hfopt.cli.output', 'hfopt.cli.watch']"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("hfopt re", {"rehearse", "report"}),
        ("hfopt gpus a10g", {"a10g"}),
        ("hfopt plan c.yaml --gpu l4", {"l4", "l40", "l40s"}),
        ("hfopt estimate --precision b", {"bf16"}),
        ("hfopt estimate --task caus", {"causal_lm"}),
        ("hfopt plan --keep bf16", {"bf16", "bf16_full_eval"}),
        ("hfopt report --ht", {"--html"}),
    ],
)
def test_a_shell_completes(typed: str, expected: set[str]) -> None:
    """As the script of --show-completion asks: by the environment, with nothing on the command line."""
    words = typed.split()
    environment = {**os.environ, "_HFOPT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv = ['hfopt']; from hfopt.cli import main; main()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert set(result.stdout.split()) == expected, result.stderr
