"""A plan as an object, and the words of a table of memory."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from made_plan import CANDIDATE, FACTS, PLAN

from hfopt.config.settings import with_raw
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import as_spelled
from hfopt.planner import comparison, memory_table
from hfopt.planner.result import Plan
from hfopt.pricing.target_device import link_of
from hfopt.schema import (
    BatchShape,
    Change,
    Correction,
    DataSpec,
    EngineChoice,
    Gpu,
    StepSettings,
    Trial,
)
from hfopt.units import GIB


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


def test_checkpointing_is_switched_off_under_every_name_the_installed_version_reads(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    names = {field.name for field in fields(TrainingArguments)}
    given = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **as_spelled({"gradient_checkpointing": True}, names))
    off = Change(key="gradient_checkpointing", before=True, after=False, reason="")
    applied = replace(PLAN, facts=replace(PLAN.facts, changes=(off,))).apply(given)
    assert applied.gradient_checkpointing is False and getattr(applied, "activation_checkpointing", False) is False


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


def test_a_printed_command_can_be_pasted_whatever_the_file_is_called() -> None:
    command = "torchrun --nproc_per_node 2 train.py 'old one.yaml'"
    several = Plan(facts=replace(FACTS, engine=EngineChoice(name="DDP", reason="", commands=(command,))))
    choice = several.started_with("a b; rm -rf $HOME.yaml").facts.engine
    assert choice is not None
    assert shlex.split(choice.commands[0]) == ["torchrun", "--nproc_per_node", "2", "train.py", "a b; rm -rf $HOME.yaml"]


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
    subject: Any = SimpleNamespace(job=with_raw(replace(FACTS.job, data=DataSpec(samples=samples)), args))
    assert comparison._run_s(subject, PLAN) == run_s


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
