"""A plan as an object, the rows of a comparison, and the words of a table of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from hfopt.errors import ConfigError
from hfopt.planner import comparison, memory_table
from hfopt.planner.result import Plan
from hfopt.planner.target import link_of
from hfopt.schema import (
    BatchShape,
    Candidate,
    Change,
    Checkpointing,
    Chosen,
    Correction,
    DataSpec,
    EngineChoice,
    Gpu,
    Hardware,
    Host,
    LoaderPlan,
    MemoryPeak,
    ModelSpec,
    PlanFacts,
    StepSettings,
    StepTime,
    TrainJob,
    Trial,
)
from hfopt.units import GIB

CANDIDATE = Candidate(per_device_batch=8, accumulation=2, precision="bf16", checkpointing=Checkpointing(every_n_layers=1))
LOADER = LoaderPlan(workers=2, prefetch_factor=2, pin_memory=True, persistent_workers=True, sample_s=1e-3, measured=False, reason="")
CHOSEN = Chosen(
    candidate=CANDIDATE,
    memory=MemoryPeak(batch=8, allocated_bytes=GIB, reserved_bytes=GIB, context_bytes=0),
    time=StepTime(step_s=0.5, busy_s=0.25, samples_per_s=32.0, tokens_per_s=None, mfu=None, bound="compute"),
    loader=LOADER,
    fits=True,
)
FACTS = PlanFacts(
    job=TrainJob(
        path=None, section=(), trainer="Trainer", args={}, model=ModelSpec(name="m"), data=DataSpec(), per_device_batch=4, accumulation=4
    ),
    hardware=Hardware(gpus=(Gpu(name="T4", memory_bytes=16 * GIB),), host=Host(cores=2, ram_bytes=GIB, ram_free_bytes=GIB)),
    effective_batch=16,
    budget_bytes=15 * GIB,
    before=CHOSEN,
    after=CHOSEN,
    changes=(Change(key="per_device_train_batch_size", before=4, after=8, reason="fewer launches"),),
    alternatives=(),
    rejected=(),
)
PLAN = Plan(facts=FACTS)


@dataclass
class Arguments:
    per_device_train_batch_size: int = 4
    seed: int = 1


def test_a_plan_made_from_arguments_gives_arguments_and_the_changed_keys() -> None:
    given = Arguments(seed=7)
    assert PLAN.apply(given) == Arguments(per_device_train_batch_size=8, seed=7) and given.per_device_train_batch_size == 4
    assert yaml.safe_load(PLAN.to_yaml()) == {"per_device_train_batch_size": 8}
    assert PLAN.alternatives == () and PLAN.candidate == CANDIDATE
    with pytest.raises(ConfigError, match="not made from a YAML file"):
        PLAN.edited()
    with pytest.raises(ConfigError, match="Candidate has no per_device_train_batch_size"):
        PLAN.apply(CANDIDATE)


def test_a_notebook_shows_the_plan() -> None:
    assert "per_device_train_batch_size" in PLAN._repr_html_() and "fewer launches" in PLAN._repr_html_()
    assert "per_device_train_batch_size" in PLAN._repr_markdown_()


def test_a_plan_is_one_line_to_a_debugger() -> None:
    line = repr(PLAN)
    assert "\n" not in line and len(line) < 160 and f"{len(PLAN.changes)} changes" in line
    assert PLAN.changes == PLAN.facts.changes


def test_commands_end_with_the_config_that_is_asked_for() -> None:
    assert PLAN.started_with("x.yaml") is PLAN
    several = Plan(facts=replace(FACTS, engine=EngineChoice(name="DDP", reason="", commands=("torchrun train.py old.yaml",))))
    choice = several.started_with("x.yaml").facts.engine
    assert choice is not None and choice.commands == ("torchrun train.py x.yaml",)


def test_json_tells_what_was_measured_and_what_had_been_predicted() -> None:
    trial = Trial(device="cuda", candidate=CANDIDATE, outcome="ok", peak_reserved_bytes=2 * GIB)
    assert PLAN.to_json()["verified"] is None
    alone = Plan(facts=replace(FACTS, trial=trial)).to_json()["verified"]
    assert alone["peak_reserved_bytes"] == 2 * GIB and "memory_error" not in alone
    found = Correction(candidate=CANDIDATE, device="cuda", predicted_reserved_bytes=GIB, measured_reserved_bytes=2 * GIB)
    assert Plan(facts=replace(FACTS, trial=trial, correction=found)).to_json()["verified"]["memory_error"] == pytest.approx(-0.5)
    assert PLAN.to_json()["device"] == "T4"
    no_card = replace(FACTS, hardware=replace(FACTS.hardware, gpus=()))
    assert Plan(facts=no_card).to_json()["device"] == "CPU"


def test_the_row_of_a_card() -> None:
    row = comparison.Row(card="T4", plan=PLAN, run_s=3600.0, cost=0.354)
    assert row.cells() == ("T4", "yes", "8 × 2 bf16 checkpointing", "32.0", "50.0 %", "1.00 GiB", "1 h 0 min", "0.35")
    every_second = replace(CANDIDATE, checkpointing=Checkpointing(every_n_layers=2))
    graded = Plan(facts=replace(FACTS, after=replace(CHOSEN, candidate=every_second)))
    assert comparison.Row(card="T4", plan=graded).cells()[2] == "8 × 2 bf16 checkpointing/2"
    assert comparison.Row(card="T4", plan=None, why_not="too small").cells()[:3] == ("T4", "no", "too small")


def test_cards_within_the_known_error_of_the_fastest_cannot_be_told_apart() -> None:
    def row(card: str, rate: float) -> comparison.Row:
        time = replace(CHOSEN.time, samples_per_s=rate, rate_error=0.22)
        return comparison.Row(card=card, plan=Plan(facts=replace(FACTS, after=replace(CHOSEN, time=time))))

    rows = (row("T4", 50.0), row("L4", 100.0), row("A10", 95.0), comparison.Row(card="P4", plan=None))
    assert rows[1].cells()[3] == "100 ± 22 %"
    told = comparison.told_apart(rows)
    assert told is not None and told.startswith("L4 and A10 cannot be told apart") and "T4" not in told
    assert comparison.told_apart(rows[:2]) is None and comparison.told_apart(()) is None


@pytest.mark.parametrize(
    ("args", "samples", "run_s"),
    [
        ({"max_steps": 100, "num_train_epochs": 9}, 3200, 50.0),
        ({"max_steps": -1}, 3200, 300.0),  # three epochs are the Trainer's default
        ({"num_train_epochs": 1}, 3200, 100.0),
        ({}, None, None),
    ],
)
def test_how_long_a_run_takes(args: dict[str, Any], samples: int | None, run_s: float | None) -> None:
    subject: Any = SimpleNamespace(job=replace(FACTS.job, args=args, data=DataSpec(samples=samples)))
    assert comparison._run_s(subject, PLAN) == run_s


def test_a_price_is_found_by_any_spelling_of_the_card() -> None:
    card = comparison.named("rtx 4090").gpus[0].name
    assert comparison._price({"4090": 0.8, "t4": 0.4}, "rtx 4090", card) == 0.8
    assert comparison._price({"RTX 4090": 0.9}, "rtx 4090", card) == 0.9
    assert comparison._price({"no such card": 1.0}, "rtx 4090", card) is None


def test_the_words_for_a_sample_and_what_is_remarkable() -> None:
    shapes = {
        "224 × 200 pixels": BatchShape(kind="image", height=224, width=200),
        "1.5 s of audio": BatchShape(kind="audio", audio_samples=24_000),
        "64 → 32 tokens": BatchShape(kind="text_to_text", length=64, target_length=32),
        "64 tokens": BatchShape(kind="text", length=64),
        None: BatchShape(kind="custom"),
    }
    assert {memory_table._sample(shape) for shape in shapes.values()} == set(shapes)
    workload: Any = SimpleNamespace(batch_dependent_loss="in-batch negatives")
    said = memory_table._remarks(workload, StepSettings(precision="bf16"), Gpu(name="T4", memory_bytes=GIB, capability=(7, 5)))
    assert said == [
        "T4 has no bf16: it needs compute capability 8.0",
        "trading batch for accumulation changes training: in-batch negatives",
    ]
    unknown = memory_table._remarks(SimpleNamespace(batch_dependent_loss=None), StepSettings(), Gpu(name="X", memory_bytes=GIB))  # type: ignore[arg-type]
    assert unknown == ["X: its generation is unknown, an A100's kernels and context are assumed"]


def test_the_link_that_was_asked_for() -> None:
    gpu = Gpu(name="A100", memory_bytes=GIB, nvlink_bytes_per_s=300e9, pcie_bytes_per_s=25e9)
    machine = replace(FACTS.hardware, gpus=(gpu,))
    assert link_of(machine, asked=None, nodes=1) == (300e9, "NVLink with 300 GB/s")
    assert link_of(machine, asked=("nvlink", 450e9), nodes=1) == (450e9, "NVLink with 450 GB/s")
    assert link_of(machine, asked=("pcie", None), nodes=1) == (25e9, "PCIe with 25 GB/s")
    assert link_of(machine, asked=("network", 50e9), nodes=1) == (50e9, "network of 400 Gbit/s")
    assert link_of(machine, asked=None, nodes=2)[0] == 12.5e9
    assert link_of(replace(machine, gpus=()), asked=None, nodes=1) == (None, "memory of this machine")
