"""The runner of mutants can tell one that is found from one that survives, and says nothing where the tests fail by themselves."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

RUNNER = Path(__file__).parents[1] / "benchmarks" / "mutation.py"
SOURCE = """
LEAST = 3
def enough(number):
    return number >= LEAST
def plain(number):
    return number + 0
def endless(number):
    while number < 3:
        number = number + 1
    return number
"""
TESTS = """
from hfopt_sample import LEAST, enough, endless, plain
def test_it():
    assert enough(3) and not enough(2)
    assert plain(5) == 5 and endless(0) == 3
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutation", RUNNER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutation", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "LIMIT_S", 1)
    monkeypatch.setattr(module, "TARGETS", {"hfopt_sample.py": ("test_of_sample.py",)})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "hfopt_sample.py").write_text(SOURCE)
    return module


def tried(runner: ModuleType, tests: str) -> dict[str, tuple[str, str]]:
    Path("test_of_sample.py").write_text(tests)

    def keep(what: str, came: object) -> None:  # in a forked process
        with Path("log").open("a") as stream:
            stream.write(json.dumps([what, came.verdict, came.by]) + "\n")  # type: ignore[attr-defined]

    runner.tried("hfopt_sample.py", {}, 1, keep)
    rows = map(json.loads, Path("log").read_text().splitlines()) if Path("log").exists() else ()
    return {what: (verdict, by) for what, verdict, by in rows}


@pytest.mark.slow
def test_found_survived_and_endless(runner: ModuleType) -> None:
    found = tried(runner, TESTS)
    assert {what: verdict for what, (verdict, _) in found.items()} == {
        "2:8-9 3 -> 4": "killed",
        "4:11-26 GtE -> Gt": "killed",
        "6:11-21 Add -> Sub": "survived",
        "6:20-21 0 -> 1": "killed",
        "8:10-20 Lt -> LtE": "killed",
        "8:19-20 3 -> 4": "killed",
        "9:17-27 Add -> Sub": "endless",
        "9:26-27 1 -> 2": "killed",
    }
    assert found["4:11-26 GtE -> Gt"][1].startswith("test_of_sample.py::test_it (call): assert (False")
    assert found["6:11-21 Add -> Sub"][1] == ""


def test_nothing_is_found_by_tests_that_fail_anyway(runner: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    assert tried(runner, TESTS + "    raise OSError\n") == {}
    assert "its tests fail without any change: test_of_sample.py::test_it (call): OSError" in capfd.readouterr().err
