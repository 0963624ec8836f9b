"""hfopt called in this process, as its command line is."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hfopt.cli import main


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """hfopt with these arguments, `given` on its stdin -> exit code, stdout, stderr, with no traceback in it."""

    def call(*arguments: object, given: bytes | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hfopt", *map(str, arguments)])
        if given is not None:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(given)))
        with pytest.raises(SystemExit) as stopped:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(stopped.value.code or 0), out, err

    return call
