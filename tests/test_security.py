"""What must never stand in the source, and what must never be said: no code from data, no shell, no token."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hfopt"
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "marshal.loads"}
UNPICKLES = {"probe/dry_run_worker.py", "probe/compiled_worker.py"}  # what their parents wrote into a folder that only this user can enter
TOKEN = "hf_" + "Zq7" * 11


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_runs_what_a_file_says(path: Path) -> None:
    for name, call in calls(path):
        assert name not in FORBIDDEN, f"{path}:{call.lineno} {name}"
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        assert given.get("shell") in (None, "False"), f"{path}:{call.lineno} starts a shell"
        asked = name == "replace"  # a spec of ours, where the user said so
        assert asked or given.get("trust_remote_code") != "True", f"{path}:{call.lineno} trusts code unasked"
        if name in ("pickle.load", "pickle.loads", "torch.load"):
            assert path.relative_to(PACKAGE).as_posix() in UNPICKLES or given.get("weights_only") == "True", f"{path}:{call.lineno}"


@pytest.mark.parametrize("arguments", [["check"], ["check", "--json"], ["doctor"], ["estimate", "--json"]])
def test_a_token_is_never_said(arguments: list[str], tmp_path: Path) -> None:
    """Wherever it stands: under its key, in another string, in a key's wrong place, in the environment."""
    config = tmp_path / "config.yaml"
    config.write_text(
        f"hub_token: {TOKEN}\nrun_name: test-{TOKEN}\nper_device_train_batch_size: {TOKEN}\nlearning_rate: 5e-5\n"
        f"my_note: '{TOKEN}'\nreport_to: [{TOKEN}]\n{TOKEN}: 3\n"
    )
    command = [sys.executable, "-m", "hfopt", *arguments, *([] if arguments == ["doctor"] else [str(config)])]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HF_TOKEN": TOKEN, "HUGGING_FACE_HUB_TOKEN": TOKEN}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr
    assert done.stdout or done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_the_words_of_a_script_are_repeated_without_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a rehearsal's verdict, a dry run's, the monitor's one line and our own errors."""
    from hfopt.cli.output import print_error
    from hfopt.errors import HfoptError
    from hfopt.monitor.fault_guard import Faults
    from hfopt.probe import dry_run, rehearsal
    from hfopt.process import child_process

    words = f"401 for {TOKEN}"
    ended = child_process.Ended(returncode=1, reason="exit", wall_s=1.0)
    verdicts = [rehearsal._unfinished(ended, [{"error": words}], 0, 3)["message"]]
    (tmp_path / "log").write_text(words)
    verdicts.append(dry_run._facts(tmp_path, ended, tmp_path / "log", 9.0)["message"])
    (tmp_path / "trial.json").write_text(f'{{"outcome": "error", "message": "{words}"}}')
    verdicts.append(dry_run._facts(tmp_path, ended, tmp_path / "log", 9.0)["message"])
    Faults(verdicts.append).report("log file", OSError(words))
    print_error(HfoptError(words))
    verdicts.append(capsys.readouterr().err)
    assert len(verdicts) == 5
    for verdict in verdicts:
        assert "401 for (hidden)" in verdict and TOKEN not in verdict
