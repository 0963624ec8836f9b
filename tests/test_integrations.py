"""The pre-commit hook and the GitHub Action, run as those programs run them: their own commands, taken from the files."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
OLD = "output_dir: o\nper_device_train_batch_size: 4\nevaluation_strategy: epoch\n"
GOOD = "output_dir: o\nper_device_train_batch_size: 4\n"
COMPOSE = "services:\n  web:\n    image: nginx\n"
BROKEN = "per_device_train_batch_size: [4\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with configs and other YAML, and `hfopt` and `python` on its path."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "hfopt"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hfopt "$@"\n')
    script.chmod(0o755)
    (tmp_path / "configs" / "deep").mkdir(parents=True)
    (tmp_path / "configs" / "deep" / "old one.yaml").write_text(OLD)
    (tmp_path / "configs" / "good.yaml").write_text(GOOD)
    (tmp_path / "docker-compose.yml").write_text(COMPOSE)
    return tmp_path


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_hook_as_pre_commit_runs_it(project: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["id"] == "hfopt-check" and hook["language"] == "python" and hook["types"] == ["yaml"] and hook["name"]
    entry = shlex.split(hook["entry"])
    failing = run([*entry, "configs/deep/old one.yaml", "configs/good.yaml", "docker-compose.yml"], project)
    assert failing.returncode == 1 and "configs/deep/old one.yaml:3:1: error: evaluation_strategy" in failing.stderr
    assert "docker-compose" not in failing.stderr
    assert run([*entry, "configs/good.yaml", "docker-compose.yml"], project).returncode == 0
    (project / "configs" / "broken.yaml").write_text(BROKEN)
    broken = run([*entry, "configs/broken.yaml"], project)
    assert broken.returncode == 1 and "configs/broken.yaml: error:" in broken.stderr and "Traceback" not in broken.stderr


def action_step(name: str) -> dict[str, object]:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    found: dict[str, object] = next(step for step in action["runs"]["steps"] if step.get("name") == name)
    return found


def test_the_action_as_a_workflow_runs_it(project: Path) -> None:
    step = action_step("Check")
    assert step["shell"] == "bash" and set(step["env"]) == {"HFOPT_CONFIGS", "HFOPT_SARIF", "HFOPT_FAIL_ON"}  # type: ignore[call-overload]
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", str(step["run"])]
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    default = inputs["configs"]["default"]
    found = run(command, project, HFOPT_CONFIGS=default, HFOPT_SARIF="found.sarif", HFOPT_FAIL_ON=inputs["fail-on"]["default"])
    assert found.returncode == 1, found.stderr
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("::error")]
    assert line.startswith("::error file=configs/deep/old one.yaml,line=3,col=1,") and "eval_strategy" in line
    log = json.loads((project / "found.sarif").read_text())
    assert [result["ruleId"] for result in log["runs"][0]["results"]] and "old%20one" in json.dumps(log)
    assert run(command, project, HFOPT_CONFIGS="configs/good.yaml", HFOPT_SARIF="", HFOPT_FAIL_ON="error").returncode == 0
    nothing = run(command, project, HFOPT_CONFIGS="none/*.yaml", HFOPT_SARIF="", HFOPT_FAIL_ON="error")
    assert nothing.returncode == 0 and "no file matches" in nothing.stdout


def test_the_action_installs_what_it_is_asked_for(project: Path) -> None:
    step = action_step("Install hfopt")
    pip = project / "bin" / "python"
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(0o755)
    command = ["bash", "-eo", "pipefail", "-c", str(step["run"])]
    newest = run(command, project, HFOPT_SOURCE="/the action", HFOPT_TRANSFORMERS="")
    assert newest.stdout.splitlines()[-2:] == ["/the action", "transformers"]
    assert run(command, project, HFOPT_SOURCE="/a", HFOPT_TRANSFORMERS="5.1").stdout.splitlines()[-1] == "transformers==5.1"
