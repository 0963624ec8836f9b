"""`hfopt plan` and `hfopt compare` as commands: what goes where, and what the shell sees when it cannot be done."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from hfopt.cli.plan import _diff
from hfopt.planner import Request, plan
from hfopt.schema import Change, Trial

CONFIG = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 500,
}
TEXT = """\
# kept as it is
model_name_or_path: {model}
max_seq_length: 32
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 6   # six
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "train.yaml"
    path.write_text(TEXT.format(model=tmp_path))
    return path


def hfopt(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hfopt", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
def test_yaml_on_stdout_report_on_stderr_and_both_files(config: Path, tmp_path: Path) -> None:
    files = ("--json", tmp_path / "plan.json", "--html", tmp_path / "p.html")
    result = hfopt("plan", config, "--gpu", "rtx 3070", "--no-dry-run", "--allow", "accumulation", *files)
    assert result.returncode == 0, result.stderr
    after = yaml.safe_load(result.stdout)
    assert result.stdout.startswith("# kept as it is\n")
    assert after["per_device_train_batch_size"] * after["gradient_accumulation_steps"] == 24
    assert "Effective batch 24" in result.stderr and "\x1b[" not in result.stderr and "Traceback" not in result.stderr
    report = result.stderr
    assert 0 < report.index("\nassumed: head ") < report.index("\nChanges"), "what the answer rests on comes before it"
    told = {item["what"]: item for item in json.loads((tmp_path / "plan.json").read_text())["assumed"]}
    assert told["head"]["guessed"] and told["head"]["settle"] == "--task" and {"length", "weights", "data size", "host"} <= told.keys()
    assert json.loads((tmp_path / "plan.json").read_text())["effective_batch"] == 24
    assert json.loads((tmp_path / "plan.json").read_text())["verified"] is None and "not tried on a device" in result.stderr
    assert "<html" in (tmp_path / "p.html").read_text()


@pytest.mark.slow
def test_a_plan_that_differs_from_its_lock_writes_no_config(config: Path, tmp_path: Path) -> None:
    lock, target = tmp_path / "train.lock", tmp_path / "planned.yaml"
    asked = ("plan", config, "--no-dry-run", "-q", "--lock", lock, "-o", target)
    assert hfopt(*asked, "--gpu", "rtx 3070").returncode == 0
    locked, planned = lock.read_bytes(), target.read_bytes()
    differs = hfopt(*asked, "--gpu", "l4", "-q")
    assert differs.returncode == 1 and "device name: GeForce RTX 3070 → L4" in differs.stderr and "no config written" in differs.stderr
    assert (lock.read_bytes(), target.read_bytes()) == (locked, planned)


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_card_that_is_not_here_is_rehearsed_on_the_virtual_gpu(config: Path, tmp_path: Path) -> None:
    result = hfopt("plan", config, "--gpu", "rtx 3070", "--json", tmp_path / "plan.json")
    assert result.returncode == 0, result.stderr
    assert "rehearsed on the virtual GPU" in result.stderr
    made = json.loads((tmp_path / "plan.json").read_text())
    assert (made["verified"]["device"], made["verified"]["outcome"]) == ("virtual", "ok")
    assert made["verified"]["peak_reserved_bytes"] == pytest.approx(made["after"]["peak_reserved_bytes"], rel=0.15, abs=8 << 20)
    assert made["verified"]["step_s"] is None, "the virtual GPU has no times"


@pytest.mark.slow
def test_nothing_fits_is_exit_3_with_an_empty_stdout(config: Path) -> None:
    result = hfopt("plan", config, "--gpu", "rtx 3070", "--vram", "0.15")
    assert (result.returncode, result.stdout) == (3, "")
    assert "nothing fits" in result.stderr and "What would fit" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_quiet_and_output_file_leave_only_the_warning(config: Path, tmp_path: Path) -> None:
    result = hfopt("plan", config, "--gpu", "rtx 3070", "--no-dry-run", "--quiet", "-o", tmp_path / "out.yaml")
    assert (result.returncode, result.stdout) == (0, "")
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("WARNING: BertForSequenceClassification with gradient_accumulation_steps 6")
    assert yaml.safe_load((tmp_path / "out.yaml").read_text())["max_seq_length"] == 32


def test_a_plan_whose_dry_run_failed_is_not_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    made = plan(config, Request(gpu="rtx 3070", dry_run=False))
    trial = Trial(device="virtual", candidate=made.candidate, outcome="error", message="NotImplementedError: BFloat16")
    monkeypatch.setattr("hfopt.cli.plan._made", lambda *_, **__: replace(made, facts=replace(made.facts, trial=trial)))
    code, out, err = run("plan", config, "-q", "--json", tmp_path / "plan.json")
    assert (code, out) == (4, "") and "NotImplementedError: BFloat16" in err and "--no-dry-run" in err
    assert json.loads((tmp_path / "plan.json").read_text())["verified"]["outcome"] == "error"


def test_the_diff_gives_the_reasons_and_is_a_patch(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_bytes(b"a: 1\r\nbf16: false\r\nlast: 2")
    change = Change(key="bf16", before=False, after=True, reason="tensor cores")
    shown = _diff(SimpleNamespace(facts=SimpleNamespace(changed_lines=(change,))), config, b"a: 1\r\nbf16: true\r\nlast: 2\nnew: 3")  # type: ignore[arg-type]
    reason, old, new, *hunk = shown.decode().split("\n")
    assert (reason, old, new) == ("# bf16: false → true: tensor cores", f"--- {config}", f"+++ {config} (planned)")
    end = "\\ No newline at end of file"
    assert hunk == ["@@ -1,3 +1,4 @@", " a: 1\r", "-bf16: false\r", "-last: 2", end, "+bf16: true\r", "+last: 2", "+new: 3", end, ""]


@pytest.mark.slow
def test_compare_plans_each_card(config: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("t4: 0.4\nrtx 4090: 0.8\n")
    result = hfopt("compare", config, "--gpus", "t4,rtx 4090", "--prices", tmp_path / "prices.yaml", "--samples", "1000", "--json")
    assert result.returncode == 0, result.stderr
    rows = {row["card"]: row for row in json.loads(result.stdout)}
    t4, big = rows["Tesla T4"], rows["GeForce RTX 4090"]
    assert t4["fits"] and big["fits"] and t4["effective_batch"] == big["effective_batch"] == 24
    assert big["samples_per_s"] >= t4["samples_per_s"] * 0.99
    assert {item["what"]: item["value"] for item in t4["assumed"]}["data size"] == "1000 samples"
    assert t4["cost"] == pytest.approx(0.4 * t4["run_s"] / 3600)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "poetry"], "--task poetry is not known"),
        (["--lr-scaling", "linear"], "add --effective-batch"),
        (["--lr-scaling", "cubic"], "one of: none, sqrt, linear"),
        (["--html", "-", "--diff"], "--html - and --diff both go to stdout"),
        (["--headroom", "6"], "0.06 leaves 6 % free"),
        (["--gpu", "rtx 9999"], "rtx 9999"),
        (["--keep", "per_device_train_batchsize"], "did you mean per_device_train_batch_size?"),
    ],
)
def test_bad_wishes_end_with_one_message(config: Path, arguments: list[str], words: str) -> None:
    result = hfopt("plan", config, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr and "Traceback" not in result.stderr


def test_two_answers_for_stdout_are_one_error_as_json(config: Path) -> None:
    result = hfopt("plan", config, "--html", "-", "--json", "-", "-o", "x.yaml")
    error = json.loads(result.stdout)["error"]
    assert result.returncode == error["exit_code"] == 2 and error["what"] == "--json - and --html - both go to stdout"
    assert error["what"] in result.stderr


NO_TRITON = """
import pathlib
is_there = pathlib.Path.is_dir
pathlib.Path.is_dir = lambda path, **options: path.name != "triton" and is_there(path, **options)
"""


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize(("gone", "sentence"), [("PATH", "found no C compiler"), ("Triton", "needs Triton"), ("ptxas", "needs ptxas")])
@pytest.mark.parametrize("asked", ["by the file", "by --allow"])
def test_what_compiling_needs_is_named_in_one_sentence_and_the_plan_goes_on(
    config: Path, tmp_path: Path, gone: str, sentence: str, asked: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TRITON if gone == "Triton" else "")
    hidden = {"PATH": {"PATH": str(tmp_path)}, "Triton": {"PYTHONPATH": str(tmp_path)}, "ptxas": {"TRITON_PTXAS_PATH": str(tmp_path / "x")}}
    if asked == "by the file":
        config.write_text(config.read_text() + "torch_compile: true\n")
    allowed = ("--allow", "torch_compile") if asked == "by --allow" else ()
    result = hfopt("plan", config, "--gpu", "rtx 3070", "--no-dry-run", *allowed, **hidden[gone])
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr
    assert "Effective batch 24" in result.stderr and yaml.safe_load(result.stdout).get("torch_compile") == (True if not allowed else None)
    (said,) = re.findall(r"WARNING: (torch_compile.*?)\n(?! )", result.stderr, re.DOTALL)
    assert sentence in " ".join(said.split())
    assert said.startswith("torch_compile was not tried" if allowed else "torch_compile: true is in the time by a rule")
