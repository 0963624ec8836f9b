"""Predicted against measured: compared where the plan was trained with, in the log, the report, the model card and as rows."""

from __future__ import annotations

import csv
import io
import json
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_plan import CHOSEN, FACTS, PLAN
from typer.testing import CliRunner
from watched import trainer, window

from hfopt.cli import application
from hfopt.monitor import history, run_text
from hfopt.monitor.callback import HFGpuMonitor
from hfopt.monitor.history import COLUMNS, Receipt, benchmark_rows, model_card, receipt_lines, receipt_of
from hfopt.monitor.log import RunLog
from hfopt.planner.result import Plan
from hfopt.units import GIB

ROOT = Path(__file__).parents[2]
ARGS: Any = SimpleNamespace(per_device_train_batch_size=8, gradient_accumulation_steps=2)
FIGURES = {"hfopt/step_s": 0.55, "hfopt/memory_reserved_gib": 0.9}


def test_a_run_with_the_planned_batch_is_compared() -> None:
    found = receipt_of(PLAN, ARGS, FIGURES)
    assert found == Receipt(
        planned_for="T4",
        predicted_step_s=0.5,
        measured_step_s=0.55,
        predicted_reserved_bytes=GIB,
        measured_reserved_bytes=round(0.9 * GIB),
    )
    assert list(receipt_lines(found)) == [
        "time of a step: 500.0 ms predicted, 550.0 ms measured (+10.0 %)",
        "memory reserved by torch: 1.00 GiB predicted, 922 MiB measured (-10.0 %)",
    ]


def test_another_batch_is_said_and_not_compared_and_no_plan_has_no_receipt() -> None:
    other: Any = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=4)
    found = receipt_of(PLAN, other, FIGURES)
    assert found is not None and found.predicted_step_s is None
    assert list(receipt_lines(found)) == ["not compared: the plan was for 8 × 2, the run trained with 4 × 4"]
    assert receipt_of(None, ARGS, FIGURES) is None
    assert list(receipt_lines(receipt_of(PLAN, ARGS, {}) or {})) == [], "nothing was measured"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my-run"
    with closing(RunLog(folder / "hfopt" / "monitor.jsonl")) as log:
        log.write(
            "header", model="BertModel", device="cuda", max_steps=101, first_step=0, world_size=1, gpus=[{"name": "T4"}],
            config={"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": True, "optim": "adamw_torch"},
            versions={"torch": "2.15.0", "transformers": "5.22.2"},
        )  # fmt: skip
        log.write("window", first_step=2, last_step=101, window=window())
        found = receipt_of(PLAN, ARGS, FIGURES)
        assert found is not None
        log.write("receipt", **asdict(found))
        log.write("summary", step=101, off={})
    return folder


def test_the_report_and_the_json_have_it(run: Path) -> None:
    loaded = history.load(run)
    assert "plan    time of a step: 500.0 ms predicted, 550.0 ms measured (+10.0 %)" in run_text.report(loaded)
    assert history.as_json(loaded)["receipt"]["predicted_step_s"] == 0.5


def test_a_section_for_the_model_card(run: Path) -> None:
    text = model_card(history.load(run))
    assert text.startswith("## Training efficiency\n\nTrained on T4 with 8 samples per device × 2 accumulation × 1 process (torch 2.15.0, ")
    assert "| time of a step | 500.0 ms | 550.0 ms | +10.0 % |" in text and "| memory reserved by torch |" in text
    shown = CliRunner().invoke(application(["report"]), ["report", str(run), "--model-card"])
    assert shown.exit_code == 0 and shown.stdout == text


def test_a_disturbed_run_says_so_beside_its_figures(run: Path) -> None:
    entry = {"kind": "finding", "time": 1.0, "step": 30, "cause": "cpu_starved", "confidence": 0.9, "evidence": {}, "message": "m"}
    with (run / "hfopt" / "monitor.jsonl").open("a") as log:
        log.write(json.dumps({**entry, "changes": [], "predicted_gain": None}) + "\n")
    loaded = history.load(run)
    assert "measured (+10.0 %); the run was disturbed (cpu_starved), which no plan predicts" in run_text.report(loaded)
    assert "The run was disturbed (cpu_starved)" in model_card(loaded)
    assert "measured by HFGpuMonitor, disturbed: cpu_starved" in benchmark_rows(loaded)
    assert "disturbed" not in "".join(receipt_lines({"predicted_step_s": 2.0, "measured_step_s": 1.0}, ["cpu_starved"]))


def test_rows_are_those_of_the_benchmark(run: Path) -> None:
    with (ROOT / "benchmarks" / "data" / "trainer_runs.csv").open() as file:
        known = list(csv.DictReader(file))
    assert tuple(known[0]) == COLUMNS
    rows = list(csv.DictReader(io.StringIO(benchmark_rows(history.load(run)))))
    assert {row["metric_kind"] for row in rows} >= {"step_seconds", "samples_per_s"}
    units = {row["metric_kind"]: row["unit"] for row in known}
    assert all(row["unit"] == units[row["metric_kind"]] for row in rows if row["metric_kind"] in units)
    assert all(row["id"].startswith("my-run#") and row["card"] == "T4" and row["precision"] == "bf16" for row in rows)
    shown = CliRunner().invoke(application(["report"]), ["report", str(run), "--rows"])
    assert shown.exit_code == 0 and shown.stdout == benchmark_rows(history.load(run))
    assert CliRunner().invoke(application(["report"]), ["report", str(run), "--rows", "--json"]).exit_code != 0


@pytest.mark.trainer
def test_a_planned_run_ends_with_its_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = []
    monitor = HFGpuMonitor(on_finding=found.append)
    run = trainer(tmp_path, monitor, logging_steps=2)
    batch, accumulation = run.args.per_device_train_batch_size, run.args.gradient_accumulation_steps
    candidate = replace(CHOSEN.candidate, per_device_batch=batch, accumulation=accumulation)
    facts = replace(FACTS, after=replace(CHOSEN, candidate=candidate), hardware=replace(FACTS.hardware, gpus=()))
    monitor._options = replace(monitor._options, plan=Plan(facts=facts))
    run.train()
    loaded = history.load(tmp_path)
    assert loaded.receipt is not None and loaded.receipt["predicted_step_s"] == 0.5
    assert loaded.receipt["measured_step_s"] == pytest.approx(loaded.figures["hfopt/step_s"])
    assert loaded.receipt["predicted_reserved_bytes"] is None, "nothing is reserved on the CPU"
    assert "hfopt: plan for the CPU: time of a step: 500.0 ms predicted, " in capsys.readouterr().err
    told = {entry["cause"] for entry in loaded.findings} - {"compute_bound"}
    assert {alert["cause"] for alert in found} == told, "each finding of the log was sent"
