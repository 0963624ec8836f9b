"""Every command explains itself, alone and in the list, and only the one that is asked for is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hfopt.cli import COMMANDS, application


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_help_and_a_line_in_the_list(command: str) -> None:
    own = CliRunner().invoke(application([command]), [command, "--help"])
    assert own.exit_code == 0 and "Usage:" in own.output and len(own.output.splitlines()) > 5
    listed = CliRunner().invoke(application([]), ["--help"]).output
    (line,) = (line for line in listed.splitlines() if line.split()[:1] == [command])
    assert len(line.split()) > 3


def test_a_typo_is_told_the_nearest_command() -> None:
    result = CliRunner().invoke(application(["gpu"]), ["gpu"])
    assert result.exit_code == 2 and "gpus" in result.output


def test_only_the_command_that_is_run_is_loaded() -> None:
    code = (
        "import sys; from hfopt.cli import application; application(['gpus', '3070'])\n"
        "print([name for name in sys.modules if name.startswith('hfopt.cli.') and name != 'hfopt.cli.output'])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['hfopt.cli.gpus']"
