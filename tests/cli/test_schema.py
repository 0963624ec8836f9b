"""`hfopt schema`: what every command prints with `--json`, errors among them, is what its schema says; a change of shape is noticed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from json_schemas import validated
from made_plan import FACTS
from watched import window

from hfopt.cli import COMMANDS, application
from hfopt.cli.json_output import FLAG, VERSIONS, command_line
from hfopt.cli.schema import TYPES, schema_of
from hfopt.errors import DryRunError, HfoptError
from hfopt.monitor.log import KINDS, RunLog
from hfopt.planner import Plan
from hfopt.schema import PhasePeak, Rehearsal, Trial
from hfopt.schema.run_outputs import FindingEntry, ReceiptEntry

ROOT = Path(__file__).parents[2]
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total capacity of 7.60 GiB of which 101.12 MiB "
    "is free. Process 77 has 1.00 GiB memory in use. Of the allocated memory 6.00 GiB is allocated by PyTorch, and 20.00 MiB is reserved "
    "by PyTorch but unallocated.\n"
)
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 500,
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    path = tmp_path / "train.yaml"
    path.write_text(
        f"model_name_or_path: {tmp_path}\ntask: causal_lm\nmax_length: 64\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 2\nbf16: true\noutput_dir: o\neval_strategy: steps\n"
    )
    return path


# ------------------------------------------------------------------------------------------------------------ every answer


@pytest.mark.slow
def test_the_plan_and_its_cards(run: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFOPT_NO_CACHE", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, _ = run("plan", config, "--gpu", "t4", "--no-dry-run", "--json")
    made = validated("plan", out)
    assert code == 0 and made["schema"] == "hfopt/plan/1" and made["effective_batch"] == 8 and "error" not in made
    assert run("plan", config, "--gpu", "t4", "--no-dry-run", "-q", "--json", tmp_path / "plan.json")[1].startswith("model_name_or_path")
    assert validated("plan", (tmp_path / "plan.json").read_text())["after"] == made["after"]
    rows = validated("compare", run("compare", config, "--gpus", "t4,l4", "--samples", "1000", "--json", "-")[1])
    assert [row["fits"] for row in rows] == [True, True]
    longer = tmp_path / "longer.yaml"
    longer.write_text(config.read_text().replace("64", "128"))
    compared = validated("diff", run("diff", config, longer, "--gpus", "t4", "--json")[1])
    assert compared["cards"][0]["second"]["peak_device_bytes"] >= compared["cards"][0]["first"]["peak_device_bytes"]
    table = validated("estimate", run("estimate", config, "--gpu", "t4", "--batch-sizes", "1,2", "--json", "-")[1])
    assert [row["fits"] for row in table["rows"]] == [True] * 4
    assert validated("cache", run("cache", "--json")[1])["entries"]


def test_what_is_read_and_not_planned(run: Run, config: Path, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("per_device_train_batch_size: 2\nevaluation_strategy: steps\noutput_dir: o\n")
    found = validated("check", run("check", "old.yaml", "--json")[1])
    assert [problem["repairable"] for problem in found["problems"]] == [True] and found["path"] == "old.yaml"
    assert validated("check", run("check", config, "--json", "-")[1])["effective_batch"]["value"] == 8
    (tmp_path / "train.log").write_text(OOM)
    assert validated("explain", run("explain", "train.log", "--json")[1])["processes"] == {"77": 1 << 30}
    (tmp_path / "fine.log").write_text("loss 1.2\n")
    code, out, _ = run("explain", "fine.log", "--json", "-")
    assert code == 1 and validated("explain", out)["found"] is False
    assert len(validated("gpus", run("gpus", "--json")[1])) > 30
    assert validated("gpus", run("gpus", "a100", "mig", "3g.40gb", "--json", "-")[1])[0]["mig"] is True
    assert validated("doctor", run("doctor", "--json", "-")[1])["software"]["torch"]


def test_runs_and_what_was_measured(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RunLog(tmp_path / "o" / "hfopt" / "monitor.jsonl")) as log:
        log.write("header", model="BertModel", device="cuda", max_steps=101, config={})
        log.write("window", window=window())
        log.write(
            "finding", step=5, cause="input_bound", confidence=0.9, evidence={"wait": 0.4}, message="slow", changes=[], predicted_gain=None
        )
        log.write("receipt", planned_for="T4", predicted_step_s=0.1, measured_step_s=0.11, why_not=None)
    one = validated("report", run("report", "o", "--json")[1])
    assert one["findings"][0]["cause"] == "input_bound" and one["receipt"]["planned_for"] == "T4"
    assert validated("report", run("report", "o", "o", "--json")[1])["before"]["steps"] == 100
    gpu = FACTS.hardware.gpus[0]
    peak = PhasePeak(phase="training", allocated_bytes=1, reserved_bytes=2, part="backward")
    seen = Rehearsal(outcome="fits", gpu=gpu, count=1, context_bytes=3, phases=(peak,), steps_done=3, script_exit_code=0, message="fits")
    monkeypatch.setattr("hfopt.probe.rehearsal.rehearse", lambda *_, **__: seen)
    assert validated("rehearse", run("rehearse", "--gpu", "t4", "--json", "python", "t.py")[1])["phases"][0]["part"] == "backward"


# ------------------------------------------------------------------------------------------------------------- every error


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "where"),
    [
        (["plan", "none.yaml", "--json", "-"], "ConfigError", 2, {"path": "none.yaml"}),
        (["plan", "--json"], "UsageError", 2, None),
        (["plan", "none.yaml", "--vram", "much", "--json"], "UsageError", 2, {"option": "--vram"}),
        (["plan", "bad.yaml", "--gpu", "t4", "--json", "-"], "ConfigError", 2, {"path": "bad.yaml", "line": 2}),
        (["plan", "bad.yaml", "--gpu", "rtx 9999", "--json", "-"], "UnknownCardError", 2, {"option": "--gpu", "argument": "rtx 9999"}),
        (["estimate", "no/model", "--json"], "UnknownModelError", 2, {"argument": "no/model"}),
        (["estimate", "--nothing", "--json", "-"], "UsageError", 2, {"option": "--nothing"}),
        (["compare", "none.yaml", "--json"], "UsageError", 2, {"option": "--gpus"}),
        (["compare", "none.yaml", "--gpus", "t4", "--sort", "x", "--json"], "ConfigError", 2, {"option": "--sort"}),
        (["diff", "none.yaml", "none.yaml", "--gpus", "t4", "--json"], "ConfigError", 2, {"path": "none.yaml"}),
        (["check", "torn.yaml", "--json"], "ConfigError", 2, {"path": "torn.yaml", "line": 2, "column": 14}),
        (["check", "torn.yaml", "--json", "--format", "x"], "ConfigError", 2, {"option": "--format"}),
        (["explain", "none.log", "--json", "-"], "LogError", 2, {"path": "none.log"}),
        (["report", "none", "--json", "-"], "LogError", 2, {"argument": "none"}),
        (["gpus", "rtx 9999", "--json"], "UnknownCardError", 2, {"argument": "rtx 9999"}),
        (["calibrate", "--show", "--clear", "--json"], "ConfigError", 2, {"option": "--show"}),
        (["rehearse", "--gpu", "t4", "--steps", "0", "--json", "python"], "UsageError", 2, {"option": "--steps"}),
        (["rehearse", "--json", "--gpu", "cpu", "python"], "HardwareError", 2, {"option": "--gpu"}),
        (["cache", "empty", "--json"], "UsageError", 2, None),
        (["doctor", "--json", "--jsn"], "UsageError", 2, {"option": "--jsn"}),
    ],
)
def test_an_error_is_one_object(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], kind: str, code: int, where: dict[str, Any] | None
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.yaml").write_text("model_name_or_path: gpt2\nper_device_train_batch_size: abc\noutput_dir: o\n")
    (tmp_path / "torn.yaml").write_text("output_dir: [o\nlearning_rate: 1\n")
    ended, out, err = run(*arguments)
    error = validated("error", out)["error"]
    assert (ended, error["exit_code"], error["kind"]) == (code, code, kind)
    assert error["what"] in err and error["fix"]
    assert where is None or {key: error["where"][key] for key in where} == where


def test_nothing_fits_is_exit_3_with_what_would(run: Run, config: Path) -> None:
    code, out, _ = run("plan", config, "--vram", "0.1", "--seq-len", "64", "--gpu", "t4", "--no-dry-run", "--json")
    error = validated("error", out)["error"]
    assert (code, error["exit_code"], error["kind"]) == (3, 3, "NothingFits") and error["fix"]


def test_a_failed_dry_run_is_one_object_with_plan_and_error(run: Run, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(device="virtual", candidate=FACTS.after.candidate, outcome="error", message="NotImplementedError: BFloat16")
    made = Plan(facts=replace(FACTS, trial=trial))
    monkeypatch.setattr(Plan, "edited", lambda self: type("Edited", (), {"data": b"", "stale_comments": ()})())
    monkeypatch.setattr("hfopt.cli.plan._made", lambda *_, **__: made)
    code, out, err = run("plan", config, "-q", "--json", "-")
    data = validated("plan", out)
    assert code == data["error"]["exit_code"] == 4 and data["error"]["kind"] == "DryRunError" and "BFloat16" in err
    assert data["verified"]["outcome"] == "error"


def test_every_error_of_the_tree_keeps_its_code(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of(kind: type[HfoptError]) -> set[type[HfoptError]]:
        return {kind, *(one for below in kind.__subclasses__() for one in all_of(below))}

    kinds = {kind for kind in all_of(HfoptError) if kind.__module__ == "hfopt.errors"}
    assert DryRunError in kinds and len(kinds) >= 10
    for kind in kinds:

        def fail(*_: object, kind: type[HfoptError] = kind, **__: object) -> None:
            raise kind("it went wrong", hint="mend it")

        monkeypatch.setattr("hfopt.hardware.checkup.checkup", fail)
        code, out, _ = run("doctor", "--json")
        error = validated("error", out)["error"]
        assert (code, error["kind"], error["what"], error["fix"]) == (kind.exit_code, kind.__name__, "it went wrong", "mend it")


def test_words_of_the_script_ask_for_nothing(run: Run) -> None:
    code, out, err = run("rehearse", "--gpu", "rtx 9999", "python", "train.py", "--json")
    assert (code, out) == (2, "") and "rtx 9999" in err
    assert run("rehearse", "--gpu", "rtx 9999", "--", "train.py", "--json")[1] == ""


# ----------------------------------------------------------------------------------------------------------------- shapes


def test_every_command_with_json_has_a_schema(run: Run) -> None:
    parser: Any = typer.main.get_command(application([]))
    takes = {name for name in COMMANDS if command_line([name], parser.commands[name]).takes_json}
    assert takes == TYPES.keys() - {"error"} and VERSIONS.keys() == TYPES.keys()
    listed = run("schema")[1]
    assert [line.split()[0] for line in listed.splitlines()] == list(VERSIONS)
    code, out, _ = run("schema", "plan")
    assert code == 0 and json.loads(out) == schema_of("plan")
    assert run("schema", "run")[0] == 2


@pytest.mark.parametrize("name", TYPES)
def test_a_published_shape_changes_only_with_its_version(name: str) -> None:
    """docs/schemas has what was published. After a change `PYTHONPATH=tests/support python tests/cli/test_schema.py`, and raise the
    version where a key went or became another."""
    published = json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text())
    assert published == schema_of(name)


def test_the_versions_of_the_document_are_those_of_the_code() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", (ROOT / "docs" / "json.md").read_text(), re.MULTILINE))
    assert {name: int(version) for name, version in told.items()} == VERSIONS


@pytest.mark.parametrize(("kind", "entry"), [("finding", FindingEntry), ("receipt", ReceiptEntry)])
def test_entries_of_a_log_are_those_that_are_read(kind: str, entry: Any) -> None:
    assert get_type_hints(entry).keys() - {"kind"} == KINDS[kind].keys()


def test_json_takes_the_form_of_its_command() -> None:
    parser: Any = typer.main.get_command(application([]))

    def form(*words: str) -> list[str]:
        return list(command_line(words, parser.commands[words[0]]).in_one_form().words)

    assert form("plan", "a.yaml", FLAG) == form("plan", "a.yaml", FLAG, "-") == ["plan", "a.yaml", FLAG, "-"]
    assert form("plan", FLAG, "-o", "b.yaml", "a.yaml") == ["plan", FLAG, "-", "-o", "b.yaml", "a.yaml"]
    assert form("plan", FLAG, "p.json", "a.yaml") == ["plan", FLAG, "p.json", "a.yaml"]
    assert form("estimate", "a.yaml", FLAG, "-") == ["estimate", "a.yaml", FLAG]
    assert form("check", FLAG, "-") == ["check", FLAG, "-"], "a lone - is standard input"
    assert form("check", "--section", "x", FLAG, "-") == ["check", "--section", "x", FLAG, "-"]
    assert form("check", "a.yaml", FLAG, "-") == ["check", "a.yaml", FLAG] and form("check", FLAG, "-", "a.yaml") == [
        "check",
        FLAG,
        "a.yaml",
    ]
    assert form("explain", "-", FLAG, "-") == ["explain", "-", FLAG]


if __name__ == "__main__":
    for one in TYPES:
        (ROOT / "docs" / "schemas" / f"{one}.json").write_text(json.dumps(schema_of(one), indent=1, ensure_ascii=False) + "\n")
