"""`hfopt rehearse`, `compare`, `run`, `plan` and `doctor`: words and exit codes, with what they rest on given by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hfopt.cli
from hfopt.cli import compare, doctor, plan, rehearse
from hfopt.cli.run import _write_beside
from hfopt.hardware.checkup import Probe
from hfopt.planner.comparison import Limits, Row
from hfopt.schema import Gpu, PhasePeak, Rehearsal, RehearsedPhase, RehearsedTime
from hfopt.units import GIB

CARD = Gpu(name="T4", memory_bytes=16 * GIB, usable_bytes=15 * GIB)
PEAK = PhasePeak(phase="step 1", part="backward", allocated_bytes=5 * GIB, reserved_bytes=6 * GIB)
LOADED = PhasePeak(phase="model load", part="", allocated_bytes=GIB, reserved_bytes=2 * GIB)


def rehearsed(**changed: Any) -> Rehearsal:
    facts = {"outcome": "fits", "gpu": CARD, "count": 1, "context_bytes": GIB, "phases": (LOADED, PEAK), "steps_done": 3}
    return Rehearsal(**{**facts, "script_exit_code": 0, "message": "fits: 3 steps rehearsed", **changed})


def shown(capsys: pytest.CaptureFixture[str], seen: Rehearsal) -> str:
    rehearse._show(seen)
    return capsys.readouterr().err


def test_the_phases_are_shown_with_the_peak_and_the_room(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = shown(capsys, rehearsed(count=2, findings=("bf16 on sm_75",), notes=("a note",)))
    assert "Rehearsal on a virtual 2 × T4 (15.00 GiB for programs)" in text
    (peak,) = [line for line in text.splitlines() if "← peak" in line]
    assert peak.split() == ["step", "1", "(backward)", "5.00", "GiB", "6.00", "GiB", "7.00", "GiB", "←", "peak"]
    assert "not supported: bf16 on sm_75." in text and "note: a note" in text
    assert "fits: 3 steps rehearsed; 8.00 GiB of 15.00 GiB stay free" in text
    assert "mean nothing here" in text


def test_nothing_stays_free_where_it_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "stay free" not in shown(capsys, rehearsed(outcome="oom", message="out of memory"))
    assert "phase" not in shown(capsys, rehearsed(outcome="failed", phases=(), message="it failed"))


TIME = RehearsedTime(
    step_s=0.2,
    busy_s=0.15,
    samples_per_s=40.0,
    steps=1,
    launches=700,
    phases=(RehearsedPhase(phase="forward", wall_s=0.08, busy_s=0.05, launches=300),),
    idle_s={"launch": 0.04, "input": 0.01, "sync": 0.00001},
    shares={"matmul": 0.6, "elementwise": 0.15, "copy": 0.001},
    rate_error=0.22,
    host_scale=0.5,
)


def test_a_rehearsed_time_is_called_predicted_and_its_gaps_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rehearse._show_time(rehearsed(time=TIME))
    text = capsys.readouterr().err
    assert "nothing was measured on a card): 200.0 ms per step, 40.0 samples/s; eight of ten such predictions are within 22.0 %" in text
    (forward,) = [line for line in text.splitlines() if line.startswith("forward")]
    assert forward.split() == ["forward", "80.0", "ms", "40.0", "%", "50.0", "ms", "300"]
    assert "idle for 25.0 % of the step: 40.0 ms the host launches, 10.0 ms fetching data\n" in text
    assert "kernels by kind: matmul 60.0 %, elementwise 15.0 %\n" in text
    assert "not timed" not in text


def test_no_time_is_said_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    rehearse._show_time(rehearsed(steps_done=1))
    assert "no time predicted: only 1 steps were done" in capsys.readouterr().err
    rehearse._show_time(rehearsed())
    assert "does not know the speed of T4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("outcome", "script", "code"),
    [("fits", 0, 0), ("unsupported", 0, 1), ("oom", 1, 3), ("failed", 7, 7), ("failed", -9, 4), ("failed", None, 4), ("timeout", None, 4)],
)
def test_the_exit_code_is_the_verdict_or_the_scripts_own(outcome: str, script: int | None, code: int) -> None:
    assert rehearse._exit_code(rehearsed(outcome=outcome, script_exit_code=script)) == code


@pytest.fixture
def ends(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """hfopt with these arguments ends with exit code 2; what it said."""

    def call(*arguments: object) -> str:
        code, _, err = run(*arguments)
        assert code == 2
        return err

    return call


def test_wrong_wishes_are_said(ends: Callable[..., str], tmp_path: Path) -> None:
    script, config = tmp_path / "x.py", tmp_path / "c.yaml"
    script.touch()
    config.write_text("per_device_train_batch_size: 4\n")
    assert "--vram: 'much' is not a size" in ends("rehearse", "--gpu", "t4", "--vram", "much", script)
    assert "--gpu cpu is not a card" in ends("rehearse", "--gpu", "cpu", script)
    assert "exclude each other" in ends("run", "--plan-only", "--dry-run", script)
    assert "leaves nothing to do" in ends("run", "--no-plan", "--plan-only", script)
    assert "--gpus names no card" in ends("compare", config, "--gpus", " , ")


def test_the_table_of_cards_goes_to_stdout_and_each_note_once_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    rows = tuple(Row(card=card, plan=None, why_not="8.00 GiB missing", notes=("odd card",)) for card in ("T4", "L4"))
    compare._show(rows, Limits(), front_only=False)
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [["card", "fits"], ["T4", "no"], ["L4", "no"]]
    assert out.count("8.00 GiB missing") == 2 and err.count("odd card") == 1


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (Probe(count=0, error="no driver"), "asked, it fails: no driver"),
        (Probe(count=0), "asked, it finds no GPU"),
        (
            Probe(count=2, bf16=True, architectures=("sm_80", "sm_90")),
            "2 GPU(s); bf16 yes, flash attention unknown; built for sm_80, sm_90",
        ),
    ],
)
def test_what_torch_says_when_it_is_asked(probe: Probe, words: str) -> None:
    assert words in doctor._torch_says(probe)


def test_a_config_that_cannot_be_edited_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("per_device_train_batch_size: [")
    _write_beside(config, {"per_device_train_batch_size": 2}, "it ran out")
    assert "hfopt: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (BrokenPipeError(), 1)])
def test_an_interrupt_and_a_reader_that_left_end_quietly(monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(hfopt.cli, "_run", fails)
    monkeypatch.setattr(hfopt.cli, "give_up_stdout", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        hfopt.cli.main()
    assert stopped.value.code == code


def test_the_console_script_leaves_torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    monkeypatch.setattr(hfopt.cli, "main", lambda: sys.exit(3))
    monkeypatch.setattr(hfopt.cli, "atexit", SimpleNamespace(_run_exitfuncs=lambda: ended.append("exit functions")))
    monkeypatch.setattr(hfopt.cli.os, "_exit", ended.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    hfopt.cli.command()
    assert ended == ["exit functions", 3]
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(SystemExit):
        hfopt.cli.command()
    assert len(ended) == 2


def test_the_deepspeed_config_becomes_a_file_beside_the_yaml(tmp_path: Path) -> None:
    class Made:
        facts = SimpleNamespace(engine=SimpleNamespace(deepspeed={"zero_optimization": {"stage": 3}}))

        def __init__(self, *told: str) -> None:
            self.told = told

        def started_with(self, config: str) -> Made:
            return Made(*self.told, config)

        with_deepspeed_file = started_with

    made: Any = Made()
    output = tmp_path / "planned.yaml"
    assert plan._with_deepspeed_beside(made, None, written=False) is made
    told: Any = plan._with_deepspeed_beside(made, output, written=True)
    assert told.told == (str(output), str(tmp_path / "planned.deepspeed.json"))
    assert json.loads((tmp_path / "planned.deepspeed.json").read_text()) == {"zero_optimization": {"stage": 3}}
    made.facts.engine.deepspeed = None
    assert plan._with_deepspeed_beside(made, output, written=True).told == (str(output),)  # type: ignore[attr-defined]
