"""`hfopt check` as it is run: words on stderr, JSON or YAML on stdout, exit code 0, 1 or 2, and never a traceback."""

from __future__ import annotations

import json
import sys
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest
import yaml

import hfopt.cli
from hfopt.config.yaml_document import MAX_BYTES

GOOD = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nlearning_rate: 1.0e-4\n"
OLD = GOOD + "evaluation_strategy: steps  # steps\nweight_decay: 1e-2\n"


class Run:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        self.monkeypatch, self.captured = monkeypatch, capfdbinary

    def __call__(self, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["hfopt", "check", *map(str, arguments)])
        self.monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(stdin)))
        self.monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
        with pytest.raises(SystemExit) as stopped:
            hfopt.cli.main()
        out, err = self.captured.readouterr()
        assert b"Traceback" not in err
        return int(stopped.value.code or 0), out.decode(), err.decode()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    return Run(monkeypatch, capfdbinary)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(OLD)
    return path


def test_a_config_without_findings(run: Run, config: Path) -> None:
    config.write_text(GOOD)
    code, out, err = run(config, "--world-size", 3)
    assert (code, out) == (0, "")
    assert "effective batch 24 = 4 per device × 2 accumulation × 3 processes" in err


def test_a_head_that_ignores_the_accumulation_is_named(run: Run, config: Path) -> None:
    faulty = "model: {name: bert-base-uncased, num_labels: 3}\n" + GOOD.replace("per_device", "training:\n  per_device").replace(
        "\ng", "\n  g"
    )
    config.write_text(faulty.replace("\nlearning", "\n  learning"))
    code, out, err = run(config)
    assert (code, out) == (1, "")
    assert f"{config}:4:3: warning: BertForSequenceClassification with gradient_accumulation_steps 2" in err and "47688" in err
    for neutral in ("model_name_or_path: gpt2\n" + GOOD, "model_name_or_path: bert-base-uncased\nper_device_train_batch_size: 4\n"):
        config.write_text(neutral)
        assert run(config)[0] == 0


def test_findings_are_told_with_their_lines(run: Run, config: Path) -> None:
    code, out, err = run(config)
    assert (code, out) == (1, "")
    assert f"{config}:4:1: error: evaluation_strategy" in err and f"{config}:5:1: error: weight_decay" in err
    assert "2 findings: `hfopt check --upgrade` repairs 2" in err
    assert config.read_text() == OLD


def test_findings_as_json(run: Run, config: Path) -> None:
    code, out, err = run(config, "--json")
    data = json.loads(out)
    assert (code, err) == (1, "")
    assert [(problem["key"], problem["place"]["line"], problem["repairable"]) for problem in data["problems"]] == [
        ("evaluation_strategy", 4, True),
        ("weight_decay", 5, True),
    ]
    assert data["effective_batch"]["value"] == 8 and data["arguments"]["eval_strategy"] == "steps"


def test_the_upgraded_config_on_stdout(run: Run, config: Path) -> None:
    code, out, _ = run(config, "--upgrade")
    assert code == 0
    assert out == GOOD + "eval_strategy: steps  # steps\nweight_decay: 1.0e-2\n"
    assert config.read_text() == OLD


def test_upgrading_in_place(run: Run, config: Path) -> None:
    assert run(config, "--upgrade", "-o", config)[:2] == (0, "")
    assert yaml.safe_load(config.read_text())["weight_decay"] == 0.01
    assert list(config.parent.iterdir()) == [config]


def test_what_only_the_user_can_mend_stays_a_finding(run: Run, config: Path) -> None:
    config.write_text(OLD + "max_steps: null\n")
    code, out, err = run(config, "--upgrade")
    assert code == 1 and "eval_strategy: steps" in out and "1 by hand" in err


def test_standard_input(run: Run) -> None:
    code, out, _ = run("-", "--upgrade", stdin=b"learning_rate: 5e-5\r\nnum_train_epochs: 1")
    assert (code, out) == (0, "learning_rate: 5.0e-5\r\nnum_train_epochs: 1")


def test_a_token_is_never_shown(run: Run, config: Path) -> None:
    secret = "hf_" + "A1b2C3" * 5
    config.write_text(GOOD + f"hub_token: {secret}\nnested: {{api_key: {secret}}}\n")
    for arguments in ([], ["--json"]):
        code, out, err = run(config, *arguments)
        assert code == 1 and secret not in out + err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.yaml"], "missing.yaml: no such file"),
        (["."], "is a directory"),
        (["{config}", "--section", "nowhere"], "no section 'nowhere'"),
        (["{config}", "--upgrade", "--json"], "both write to stdout"),
        (["{config}", "-o", "x.yaml"], "-o needs something to write"),
        (["{config}", "--upgrade", "-o", "/nowhere/x.yaml"], "cannot write /nowhere/x.yaml"),
    ],
)
def test_what_cannot_be_done_is_exit_code_2(run: Run, config: Path, arguments: list[str], message: str) -> None:
    code, out, err = run(*(argument.format(config=config) for argument in arguments))
    assert code == 2
    if "--json" in arguments:
        assert json.loads(out)["error"]["exit_code"] == 2
    else:
        assert out == ""
    assert message in err
    assert config.read_text() == OLD


def test_a_stream_without_end_is_no_config(run: Run) -> None:
    code, _, err = run("-", stdin=b"#" * (MAX_BYTES + 2))
    assert code == 2 and "larger than" in err and "not a training config" in err


def test_at_a_terminal_findings_have_colours(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "argv", ["hfopt", "check", str(config)])
    with pytest.raises(SystemExit):
        hfopt.cli.main()
    assert "evaluation_strategy" in screen.getvalue() and "\x1b[" in screen.getvalue()


def test_a_comment_that_states_the_old_value_is_told(run: Run, config: Path) -> None:
    config.write_text(GOOD + "optim: adamw_hf  # adamw_hf is fine\n")
    _, _, err = run(config, "--upgrade", "-o", config.with_name("out.yaml"))
    assert f"{config}:4:18: the comment still states the old value adamw_hf: # adamw_hf is fine" in err


def test_several_files_are_checked_and_other_yaml_is_passed_over(run: Run, config: Path, tmp_path: Path) -> None:
    good, other = tmp_path / "good.yaml", tmp_path / "compose.yaml"
    good.write_text(GOOD)
    other.write_text("services: {web: 1}\n")
    code, out, err = run(config, good)
    assert (code, out) == (1, "") and "2 findings" in err and "no findings" in err
    code, _, err = run(good, other)
    assert code == 1 and f"{other}: error: " in err and "not of the HuggingFace Trainer" in err
    assert run(good, other, "--only-configs")[0] == 0
    for broken in ("per_device_train_batch_size: [1\n", "a: 1\n---\nnum_train_epochs: 3\n"):
        other.write_text(broken)
        assert run(good, other, "--only-configs")[0] == 1, "meant for a Trainer, so its error is told"
    other.write_text("a: 1\n---\nb: 2\n")
    assert run(other, "--only-configs")[0] == 0


def test_warnings_can_be_shown_without_failing(run: Run, tmp_path: Path) -> None:
    warned = tmp_path / "warned.yaml"
    warned.write_text("output_dir: x\nnum_train_epochs: 1\ngradient_acumulation_steps: 4\n")
    assert run(warned)[0] == 1 and run(warned, "--only-configs")[0] == 1
    code, _, err = run(warned, "--fail-on", "error")
    assert code == 0 and "1 finding: 1 to repair by hand" in err
    assert run(warned, "--only-configs", "--fail-on", "error")[0] == 0
    warned.write_text("output_dir: x\nnum_train_epochs: 1\nevaluation_strategy: epoch\n")
    assert run(warned, "--fail-on", "error")[0] == 1
    assert run(warned, "--fail-on", "none")[0] == 2


def test_formats_for_machines(run: Run, config: Path, tmp_path: Path) -> None:
    code, out, err = run(config, "--format", "github")
    assert (code, err) == (1, "") and [line.partition(" ")[0] for line in out.splitlines()] == ["::error", "::error"]
    code, out, _ = run(config, "--format", "sarif")
    assert code == 1 and len(json.loads(out)["runs"][0]["results"]) == 2
    assert run(config, "--format", "sarif", "-o", tmp_path / "x.sarif")[:2] == (1, "")
    assert json.loads((tmp_path / "x.sarif").read_text())["version"] == "2.1.0"
    for arguments, words in (
        (["--format", "xml"], "one of: text, github, sarif"),
        (["--format", "sarif", "--json"], "take one config"),
        (["--only-configs", "--upgrade"], "take one config"),
        (["--only-configs", "-o", "x"], "-o needs something to write"),
    ):
        code, out, err = run(config, *arguments)
        assert (code, bool(out)) == (2, "--json" in arguments) and words in err
