"""What typer reads from a command line is the same with its pydantic and without, and a usual command line does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from hfopt.compat.fast_import import spare_pydantic

CHILD = """
import sys
import typer
of_typer = {"rich"} & sys.modules.keys()  # older ones import it themselves
from hfopt.cli import main
sys.argv = ["hfopt", "plan", "no_such_file.yaml", "--gpu", "4090", "-q", "-o", "out.yaml"]
try:
    main()
except SystemExit as end:
    assert end.code, "a file that is not there is refused"
loaded = {"pydantic", "torch", "transformers", "rich"} & sys.modules.keys() - of_typer
assert not loaded, loaded
"""


def test_a_usual_command_line_imports_neither_pydantic_nor_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "no_such_file.yaml" in ended.stderr


LINES: list[list[str]] = [
    ["file.yaml"],
    ["file.yaml", "--name", "4090", "--out", "a/b"],
    ["file.yaml", "--count", "3", "--share", "0.5"],
    ["file.yaml", "--count", "0"],
    ["file.yaml", "--count", "three"],
    ["file.yaml", "--share", ""],
    ["file.yaml", "--item", "a", "--item", "b"],
    ["file.yaml", "--there", "/no/such/file"],
    ["", "--name", ""],
    [],
]


def read(line: list[str]) -> tuple[int, str]:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @app.command()
    def command(
        config: Annotated[Path, typer.Argument()],
        name: Annotated[str | None, typer.Option("--name")] = None,
        out: Annotated[Path | None, typer.Option("--out")] = None,
        there: Annotated[Path | None, typer.Option("--there", exists=True)] = None,
        count: Annotated[int, typer.Option("--count", min=1)] = 7,
        share: Annotated[float, typer.Option("--share")] = 0.06,
        item: Annotated[list[str] | None, typer.Option("--item")] = None,
    ) -> None:
        found: list[Any] = [config, name, out, there, count, share, item]
        sys.stdout.write(repr([(type(value).__name__, value) for value in found]))

    ended = CliRunner().invoke(app, line)
    return ended.exit_code, ended.output


@pytest.mark.skipif(not hasattr(typer.core, "_TyperParameter"), reason="this typer converts without pydantic; 0.27 does with it")
@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line) or "nothing")
def test_options_are_read_as_typer_reads_them(line: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = typer.core._TyperParameter
    whole = parameter.get_runtime_param
    monkeypatch.setattr(parameter, "get_runtime_param", getattr(whole, "whole", whole))
    plain = read(line)
    spare_pydantic()
    assert hasattr(parameter.get_runtime_param, "whole")
    assert read(line) == plain
