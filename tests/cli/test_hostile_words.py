"""Names and logs that others wrote: nothing in them steers the terminal, is read as markup, or ends a command in a traceback."""

from __future__ import annotations

import ast
import io
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from watched import window

from hfopt.cli import application, output
from hfopt.errors import ConfigError, HfoptError, LogError
from hfopt.monitor import history, run_text, screen
from hfopt.monitor.log import RunLog
from hfopt.planner.plan_diff import read_lock
from hfopt.redact import json_words, printable, said

runner, app = CliRunner(), application([])
EVIL = "m\x1b]0;title\x07\x1b[2J\x9b31m[/bold][red]<script>alert(1)</script>\u202e\r"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
PACKAGE = Path(__file__).parents[2] / "hfopt"
WRITES = {"cli/output.py", "cli/__init__.py", "oom/next_settings.py", "monitor/fault_guard.py", "monitor/metrics.py"}
"""The modules that write to a terminal themselves, each through `printable` or `said`."""
IN_A_CHILD = ("probe/dry_run_worker.py", "virtual/site/", "process/child_guard.py", "site/")


def evil_log(folder: Path) -> Path:
    finding = {"cause": EVIL, "confidence": 1.0, "evidence": {EVIL: 1.0}, "message": EVIL, "changes": [], "predicted_gain": None, "step": 3}
    with closing(RunLog(folder / "hfopt" / "monitor.jsonl")) as log:
        log.write("header", model=EVIL, device=EVIL, gpus=[{"name": EVIL}], versions={"torch": EVIL}, config={EVIL: EVIL}, max_steps=9)
        log.write("window", window=window())
        log.write("finding", **finding)
        log.write("fallback", seen={"phase": EVIL, "micro_batch": 4, "step": 2}, step={"reason": EVIL})
        log.write("resolved", step=4, cause=EVIL)
        log.write("summary", step=9, off={EVIL: EVIL})
    live = {"time": 0.0, "pid": 2**22 + 1, "step": 1, "max_steps": 2, "status": EVIL, "pace": EVIL, "points": [], "findings": [EVIL]}
    (folder / "hfopt" / "live.json").write_text(json.dumps(live))
    return folder


@pytest.mark.parametrize("words", [["report", "RUN"], ["report", "RUN", "RUN"], ["report", "RUN", "--json"], ["watch", "RUN", "--once"]])
def test_a_log_does_not_steer_the_terminal(words: list[str], tmp_path: Path) -> None:
    run = evil_log(tmp_path)
    done = runner.invoke(app, [str(run) if word == "RUN" else word for word in words])
    assert done.exit_code == 0 and "alert(1)" in done.output
    assert STEERS.search(done.output) is None


def test_a_log_does_not_run_in_a_page(tmp_path: Path) -> None:
    page = runner.invoke(app, ["report", str(evil_log(tmp_path)), "--html", "-"]).output
    assert "alert(1)" in page and "<script>alert" not in page
    assert not re.search(r"[\x1b\x07\x9b\u202e]", page)


@pytest.mark.parametrize("terminal", [True, False])
def test_the_consoles_take_names_as_words(terminal: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    file = io.StringIO()
    console = output._console()(file=file, force_terminal=terminal, markup=False, highlight=False, width=200, color_system=None)
    table = Table(EVIL)
    table.add_row(EVIL)
    for thing in (
        EVIL,
        Text(EVIL, style="bold"),
        table,
        screen.render(json.loads(json.dumps({"time": 0.0, "pid": 1, "points": []})), EVIL, 80),
    ):
        console.print(thing)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) if terminal else file.getvalue()
    assert shown.count("[/bold][red]") == 5 and STEERS.search(shown) is None


def test_a_spinner_takes_names_as_words() -> None:
    console = output._console()(file=io.StringIO(), force_terminal=True, markup=False, width=200)
    plain = output._console()(file=io.StringIO(), markup=False, width=200)
    with console.status("reading") as status:
        output.progress_on(status)(f"tracing {EVIL}")  # markup that ends what never began would raise here
        plain.print(status.renderable)
    shown = plain.file.getvalue()
    assert "tracing" in shown and "[/bold][red]" in shown and STEERS.search(shown) is None


def test_errors_and_hints_are_words(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_error(HfoptError(f"no {EVIL}", hint=f"look at {EVIL}"))
    said = capsys.readouterr().err
    assert said.count("alert(1)") == 2 and STEERS.search(said) is None


@pytest.mark.parametrize(
    "command", [["check"], ["estimate"], ["check", "--json"], ["check", "--format", "sarif"], ["check", "--format", "github"]]
)
def test_a_config_does_not_steer_the_terminal(command: list[str], tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    escaped = json.dumps(EVIL)
    config.write_text(f"model_name_or_path: {escaped}\noutput_dir: x\n{escaped}: 3\nlr_scheduler_type: {escaped}\n")
    done = runner.invoke(app, [*command, str(config)])
    said = done.output if done.exception is None or isinstance(done.exception, SystemExit) else _shown(done.exception)
    assert said and STEERS.search(said) is None


NAME = EVIL.replace("/", "") + " $(touch pwned)';&"
TOKEN = "hf_" + "Zq7" * 11
COMMANDS = (
    "estimate A --gpu t4",
    "estimate A --gpu t4 --json",
    "estimate MODEL",
    "plan A --gpu t4 --no-dry-run -o OUT",
    "plan B --gpu t4 --no-dry-run -o OUT --json -",
    "plan A --gpu t4 --no-dry-run -o OUT --lock LOCK",
    "plan B --gpu t4 --no-dry-run -o OUT --lock LOCK",
    "compare A --gpus t4,l4",
    "compare A --gpus t4,l4 --json",
    "diff A B --gpus t4",
    "diff A B --gpus t4 --json",
    "explain LOG",
    "explain LOG --json",
    "explain LOG --config A",
    "gpus NAME",
    "schema NAME",
    "watch MODEL",
    "report MODEL",
    "run NAME",
    "rehearse --gpu t4 -- NAME",
)


@pytest.mark.slow
def test_no_command_is_steered_by_names_or_says_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the model, the dataset, the output folder and a key are hostile, and so is a log; the token stands in four places."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    places = {"NAME": NAME, "OUT": str(tmp_path / "out.yaml"), "LOCK": str(tmp_path / "lock.json"), "LOG": str(tmp_path / "log.txt")}
    model = tmp_path / NAME
    model.mkdir()
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    (model / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **tiny}))
    words = {"model_name_or_path": str(model), "dataset_name": NAME, "output_dir": f"out-{NAME}", "run_name": f"run {TOKEN}"}
    for name, batch in (("A", 2), ("B", 4)):
        config = {**words, "hub_token": TOKEN, "max_seq_length": 64, "per_device_train_batch_size": batch, NAME: NAME}
        places[name] = str(tmp_path / f"{name} $(x).yaml")
        Path(places[name]).write_text(json.dumps(config))
    where = f'Traceback (most recent call last):\n  File "{NAME}", line 3, in f\n    {NAME} {TOKEN}\n'
    oom = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Process {NAME} {TOKEN}\n"
    Path(places["LOG"]).write_text(NAME + where + oom)
    for command in COMMANDS:
        done = runner.invoke(app, [{**places, "MODEL": str(model)}.get(word, word) for word in command.split()])
        assert done.exception is None or isinstance(done.exception, (SystemExit, HfoptError)), (command, done.exception)
        shown = done.output + (said(str(done.exception)) if isinstance(done.exception, HfoptError) else "")
        assert shown and STEERS.search(shown) is None and TOKEN not in shown, command
    locked = Path(places["LOCK"]).read_text()
    assert STEERS.search(locked) is None and TOKEN not in locked


def test_json_says_what_steers_by_its_number() -> None:
    text = json_words(json.dumps({EVIL: EVIL}, ensure_ascii=False))
    assert json.loads(text) == {EVIL: EVIL} and STEERS.search(text) is None


LIVE_SPOTS: dict[str, Any] = {
    "time": 0.0, "pid": 2**22 + 1, "step": 1, "max_steps": 2, "status": "s", "pace": "p", "loss": 1.0, "s_per_step": 2.0, "cores": 2.0,
    "ended": False, "points": [{"gpu": 0.5, "cpu": 0.5, "core_wait": 0.9}], "findings": ["f"],
}  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_live_file_that_was_changed_is_shown_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    live = json.loads(json.dumps(LIVE_SPOTS))
    spots = _spots(live)
    holder, key = data.draw(st.sampled_from(range(len(spots))).map(lambda index: spots[index]))
    holder[key] = data.draw(LINES)
    path = tmp_path_factory.mktemp("run") / "live.json"
    path.write_text(json.dumps(live))
    try:
        said = "".join(screen.lines(screen.read_live(path), 80))
    except LogError as error:
        said = str(error)
    assert said


@pytest.mark.parametrize("content", ["[" * 100_000, "\x00" * 99, "[]", "3"])
def test_files_made_to_break_a_reader(content: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(LogError):
        screen.read_live(tmp_path / "file.json")
    with pytest.raises(ConfigError):
        read_lock(tmp_path / "file.json")


def _shown(error: BaseException) -> str:
    assert isinstance(error, HfoptError), error
    return printable(str(error))


def test_only_few_modules_write_to_the_terminal_themselves() -> None:
    """Everybody else goes through them, so that nothing can be forgotten."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if {"sys.stdout.write", "sys.stderr.write", "print", "Console", "typer.echo"} & set(calls) and not name.startswith(IN_A_CHILD):
            found.add(name)
    assert found <= WRITES


LINES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_log_that_was_changed_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """One value of a real log is replaced by any other: a report, or one sentence."""
    folder = tmp_path_factory.mktemp("run")
    entries = [json.loads(line) for line in (evil_log(folder) / "hfopt" / "monitor.jsonl").read_text().splitlines()]
    spots = [(holder, key) for entry in entries for holder, key in _spots(entry)]
    holder, key = data.draw(st.sampled_from(range(len(spots))).map(lambda index: spots[index]))
    holder[key] = data.draw(LINES)
    log = folder / "monitor.jsonl"
    log.write_text("\n".join(json.dumps(entry) for entry in entries))
    try:
        run = history.load(log)
        said = run_text.report(run) + run_text.compare(run, run) + json.dumps(history.as_json(run)) + run_text.view(run).what
    except LogError as error:
        said = str(error)
    assert said


def test_a_window_without_one_of_its_figures_is_reported(tmp_path: Path) -> None:
    log = evil_log(tmp_path) / "hfopt" / "monitor.jsonl"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        if entry["kind"] == "window":
            entry["window"]["allocated_peak_bytes"] = None
    log.write_text("\n".join(json.dumps(entry) for entry in entries))
    assert "GiB reserved" in run_text.report(history.load(log))


def _spots(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [spot for key in keys for spot in ((value, key), *_spots(value[key]))]


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"kind": "header", "time": 1e999}', '{"kind": "header", "time": NaN, "max_steps": 1e400}', "\x00" * 99]
)
def test_lines_made_to_break_a_reader(line: str, tmp_path: Path) -> None:
    log = tmp_path / "monitor.jsonl"
    log.write_text(line + "\n")
    try:
        said = run_text.report(history.load(log))
    except LogError as error:
        said = str(error)
    assert said
