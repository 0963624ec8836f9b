"""Every config that comes with hfopt is planned for its card, and what comes out loads into the installed TrainingArguments."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.hardware import catalog
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.model.from_config import from_spec
from hfopt.planner import Plan, Request, plan
from hfopt.schema import DataSpec, ModelSpec, StepSettings, Workload
from hfopt.virtual.environment import environment

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
_TRACES: dict[StepSettings, Estimate] = {}

LOAD = """
import dataclasses, json, sys
from transformers import Seq2SeqTrainingArguments
names = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.init}
for name, values in json.load(sys.stdin).items():
    made = Seq2SeqTrainingArguments(**{key: value for key, value in values.items() if key in names})
    wrong = {key: (value, getattr(made, key)) for key, value in values.items() if key in ("bf16", "fp16", "per_device_train_batch_size",
             "gradient_accumulation_steps", "gradient_checkpointing", "dataloader_num_workers") and getattr(made, key) != value}
    assert not wrong, (name, wrong)
    sys.stdout.write(name + "\\n")
"""


def of_a_small_model(_: Workload, settings: StepSettings) -> Estimate:
    """What is written is tested here, not what is best: one small model's traces stand for all."""
    if settings not in _TRACES:
        small = from_spec(ModelSpec(name=str(ROOT / "configs" / "models" / "tiny-text"), num_labels=4), DataSpec(max_length=64))
        _TRACES[settings] = estimate(small, settings)
    return _TRACES[settings]


def card_of(config: Path) -> str:
    """The one its first line names; the config that is there for `hfopt check` names none."""
    named = re.search(r'--gpu (?:"([^"]+)"|(\S+))', config.read_text().splitlines()[0])
    return "t4" if named is None else named[1] or named[2]


def planned(config: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    monkeypatch.chdir(ROOT)
    request = Request(gpu=card_of(config), dry_run=False, allow=frozenset({"accumulation"}), trust_remote_code=True, **options)
    return plan(config, request, estimator=of_a_small_model)


def arguments(made: Plan) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(made.to_yaml())
    for part in made.facts.job.section:
        values = values[part]
    return values


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    with pytest.MonkeyPatch.context() as patch:
        return {path.name: planned(path, patch) for path in CONFIGS}


def test_every_report_fits_on_one_screen(plans: dict[str, Plan]) -> None:
    assert len(plans) == len(CONFIGS) > 5
    for name, made in plans.items():
        lines = made.report().splitlines()
        assert len(lines) <= 40 and max(map(len, lines)) <= 100, (name, len(lines))
        assert any(line.startswith("Use it ") for line in lines[-5:]) and lines[-1].startswith("More "), name


def test_every_plan_keeps_the_effective_batch_and_names_only_keys_that_exist(plans: dict[str, Plan]) -> None:
    from transformers import Seq2SeqTrainingArguments

    names = {item.name for item in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert len(plans) >= 10
    for name, made in plans.items():
        values, before = arguments(made), made.facts.job
        batch = values["per_device_train_batch_size"] * values.get("gradient_accumulation_steps", 1)
        assert batch == before.effective_batch, name
        assert {change.key for change in made.facts.changes} <= names, name
        plain = {key: value for key, value in values.items() if key in names and key not in ("bf16", "fp16", "tf32")}
        loaded = Seq2SeqTrainingArguments(**plain, use_cpu=True, report_to=[])
        assert loaded.per_device_train_batch_size == values["per_device_train_batch_size"], name


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_what_comes_out_loads_where_the_card_is(plans: dict[str, Plan]) -> None:
    """TrainingArguments asks the card about bf16 and tf32: the virtual one answers as a card of the same capability."""
    by_card: dict[tuple[int, int], dict[str, Any]] = {}
    for name, made in plans.items():
        gpu = made.facts.hardware.smallest
        assert gpu is not None and gpu.capability is not None
        by_card.setdefault(gpu.capability, {})[name] = arguments(made)
    loaded = []
    for capability, found in by_card.items():
        card = next(card for card in catalog.cards() if card.capability == capability)
        done = subprocess.run(
            [sys.executable, "-c", LOAD], input=json.dumps(found), env=environment(card), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        loaded += done.stdout.split()
    assert sorted(loaded) == sorted(plans)


@pytest.mark.slow
@pytest.mark.virtual_gpu
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_the_command_in_its_first_line_works(config: Path, tmp_path: Path) -> None:
    """As it stands there: with the model's own traces, and rehearsed on a virtual card."""
    command = [sys.executable, "-m", "hfopt", "plan", str(config), "--gpu", card_of(config), "--trust-remote-code"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert isinstance(yaml.safe_load(done.stdout), dict)
    cannot_run = config.stem == "sound_cnn_lstm_rtx4060"  # cuDNN's LSTM
    assert ("rehearsed on the virtual GPU: " in done.stderr) != cannot_run, done.stderr
