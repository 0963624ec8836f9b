"""Whatever is typed behind `hfopt`, it ends with an exit code and at most a message: never a traceback, never a wait."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hfopt.cli

COMMANDS = {  # the options of each; commands that would start a training are given no command they could start
    "check": ["--section", "--upgrade", "-o", "--json", "--world-size"],
    "gpus": ["--json"],
    "report": ["--json", "--html"],
    "watch": ["--once", "--pid", "--interval"],
    "plan": ["--gpu", "--vram", "--num-gpus", "--seq-len", "--task", "--keep", "--allow", "--lr-scaling", "--effective-batch", "--json"],
    "estimate": ["--gpu", "--vram", "--seq-len", "--task", "--json"],
    "compare": ["--gpu", "--vram", "--json"],
    "run": ["--restarts", "--config"],
    "rehearse": ["--gpu", "--steps", "--timeout", "--num-gpus"],
}
ODD = [
    "",
    "-",
    "--",
    "---",
    "\x00",
    "é×→",
    "a" * 300,
    "/",
    "/dev/null/x",
    "nan",
    "-1",
    "1e999",
    "999999999999999999999",
    "{}",
    "[]",
    "%s",
    "$(x)",
]
words = st.one_of(st.sampled_from(ODD), st.text(max_size=8), st.integers().map(str), st.floats().map(str))
MISSING = "there/is/no/such/file.yaml"  # so that nothing long begins


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(sorted(COMMANDS)))
    line = [name]
    for _ in range(draw(st.integers(0, 3))):
        line.append(draw(st.sampled_from(COMMANDS[name])))
        if draw(st.booleans()):
            line.append(draw(words))
    line += draw(st.sampled_from([[], [MISSING], [MISSING, MISSING]]))
    return line


def ended(arguments: list[str]) -> tuple[int, str]:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    before = sys.argv
    sys.argv = ["hfopt", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            hfopt.cli.main()
    except SystemExit as stopped:
        code = stopped.code
    else:
        code = 0
    finally:
        sys.argv = before
    err.flush()
    assert code is None or isinstance(code, int)
    return code or 0, err.buffer.getvalue().decode()  # type: ignore[attr-defined]


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=command_lines())
def test_any_line_ends_with_a_code_and_a_message(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    code, said = ended(arguments)
    assert code in (0, 1, 2), (arguments, code, said)
    assert "Traceback" not in said
    assert said or code in (0, 1)
    assert not list(tmp_path.iterdir()), "a line that fails leaves no file"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(arguments=st.lists(words, max_size=4))
def test_any_words_at_all(arguments: list[str]) -> None:
    code, said = ended([word for word in arguments if word not in COMMANDS])
    assert code in (0, 2), (arguments, code, said)
