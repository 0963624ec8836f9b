"""Colocated vLLM: what it takes of the card, when, and what a share that leaves too little is answered with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from made_jobs import made_job

from hfopt import plan
from hfopt.config.settings import with_raw
from hfopt.errors import ConfigError, NothingFits
from hfopt.facts.training_keys import trl_default
from hfopt.hardware.detect import named
from hfopt.job.request import Request
from hfopt.planner.memory_table import memory_table, read_subject
from hfopt.planner.result import Plan
from hfopt.pricing.grpo import (
    SHARE,
    SLEEP,
    advice_when_short,
    batch_rule,
    colocated_vllm,
    evaluation_notes,
    group_size,
    room_beside,
    steps_change,
)
from hfopt.schema import DataSpec, ModelSpec, TrainJob
from hfopt.units import GIB

JOB = made_job(
    path=None,
    section=(),
    trainer="GRPO",
    raw={"use_vllm": True},
    model=ModelSpec(name=None),
    data=DataSpec(),
    per_device_batch=8,
    accumulation=4,
)
CARD = named("4090").gpus[0]
TOTAL = CARD.usable_bytes or CARD.memory_bytes


def with_args(**args: Any) -> TrainJob:
    return with_raw(JOB, {**JOB.raw, **args})


def test_the_defaults_are_those_of_the_installed_trl() -> None:
    assert trl_default("GRPO", SHARE) == 0.3 and trl_default("GRPO", "vllm_mode") == "colocate"
    assert trl_default("RLOO", "num_generations") == 2 and trl_default("GRPO", "no such key") is None
    assert trl_default("NoSuchTrainer", SHARE) is None
    assert group_size(JOB) == 8


def test_what_it_takes_and_when() -> None:
    found = colocated_vllm(JOB, CARD)
    assert found is not None and found.share_bytes == int(0.3 * TOTAL) == found.resident_bytes
    assert [(one.value, one.guessed, one.settle) for one in found.assumed] == [
        ("on the training's card", True, "vllm_mode"),
        ("0.3", True, SHARE),
    ]
    asleep = colocated_vllm(with_args(**{SLEEP: True, SHARE: 0.5}), CARD)
    assert asleep is not None and asleep.share_bytes == int(0.5 * TOTAL) and asleep.resident_bytes == 0 and not asleep.assumed[1].guessed


@pytest.mark.parametrize(
    "args", [{"vllm_mode": "server"}, {"use_vllm": False}, {"use_vllm": None}], ids=["a server", "no vLLM", "not stated"]
)
def test_what_takes_nothing_of_this_card(args: dict[str, Any]) -> None:
    assert colocated_vllm(with_args(**args), CARD) is None
    assert room_beside(None, 7, CARD) == 7


def test_a_running_vllm_is_not_counted_twice() -> None:
    assert colocated_vllm(JOB, CARD, runs_already=True) is None
    assert colocated_vllm(JOB, None) is None, "there is no card"


def test_a_share_that_leaves_nothing_gets_one_sentence() -> None:
    greedy = colocated_vllm(with_args(**{SHARE: 0.95}), CARD)
    with pytest.raises(NothingFits, match=r"colocated vLLM takes 22\.\d+ GiB .*leaves 0 B for training") as ended:
        room_beside(greedy, int(0.94 * TOTAL), CARD)
    assert SLEEP in (ended.value.hint or "") and "vllm_mode: server" in (ended.value.hint or "")
    with pytest.raises(ConfigError, match="is no share"):
        colocated_vllm(with_args(**{SHARE: 30}), CARD)


def test_the_batch_rule_holds_for_rloo_too() -> None:
    stated = replace(with_args(steps_per_generation=2), trainer="RLOO")  # type: ignore[arg-type]
    assert batch_rule(stated).divides == 16 and not batch_rule(stated).keeps_pair
    assert batch_rule(replace(stated, kept=frozenset({"steps_per_generation"}))).keeps_pair
    assert [pair[:2] for pair in steps_change(stated, 4)] == [("steps_per_generation", 4)]
    assert steps_change(with_args(generation_batch_size=16, steps_per_generation=2), 4) == () == steps_change(JOB, 4)


def planned(folder: Path, **more: Any) -> Plan:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 8000}
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(config))
    job = {"num_generations": 4, "max_prompt_length": 128, "max_completion_length": 128, "use_vllm": True, "bf16": True}
    job |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16, "output_dir": "out"}
    path = folder / "grpo.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": str(folder / "model"), **job, **more}))
    return plan(path, Request(vram_gib=6.0, dry_run=False, charts=False))


@pytest.mark.slow
def test_steps_per_generation_follow_the_batch(tmp_path: Path) -> None:
    made = planned(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=32, steps_per_generation=32)
    after = {change.key: change.after for change in made.facts.changes}
    assert after["per_device_train_batch_size"] > 1
    assert after["steps_per_generation"] * after["per_device_train_batch_size"] == 32, "as many completions at once as before"
    assert f"steps_per_generation: {after['steps_per_generation']}" in made.edited().data.decode()


@pytest.mark.slow
def test_an_evaluation_that_generates_gets_a_sentence(tmp_path: Path) -> None:
    job = {"eval_strategy": "steps", "eval_steps": 10}
    made = planned(tmp_path, **job, per_device_eval_batch_size=4)
    assert any("an evaluation of GRPO generates and scores 4 completions" in note for note in made.facts.notes)
    (large,) = evaluation_notes(SimpleNamespace(job=with_args(**job, per_device_eval_batch_size=64)), 8)  # type: ignore[arg-type]
    assert "not in the figures" in large and "per_device_eval_batch_size at 8" in large
    assert evaluation_notes(SimpleNamespace(job=JOB), 8) == ()  # type: ignore[arg-type]


def test_what_of_vllm_would_make_room() -> None:
    vllm = colocated_vllm(with_args(**{SHARE: 0.5}), CARD)
    assert vllm is not None
    budget = int(0.94 * TOTAL) - vllm.resident_bytes
    small = SimpleNamespace(workload=SimpleNamespace(parameters=100_000_000))

    def said(needed: int) -> list[str]:
        return list(advice_when_short(vllm, small, needed_bytes=needed, budget_bytes=budget))  # type: ignore[arg-type]

    shares = [line for line in said(budget + GIB) if SHARE in line]
    assert len(shares) == 1
    share = float(shares[0].rpartition(f"({SHARE}: ")[2].rstrip(")"))
    assert 0.3 < share < 0.5 and budget + GIB <= 0.94 * TOTAL - share * TOTAL, "the training fits beside that share"
    assert not any(SHARE in line for line in said(int(0.93 * TOTAL))), "no share would hold vLLM's own weights"
    assert any(SLEEP in line for line in said(int(0.93 * TOTAL)))
    assert said(int(0.95 * TOTAL)) == [], "it does not fit the card at all"


@pytest.mark.slow
def test_estimate_takes_the_share_off(tmp_path: Path) -> None:
    planned(tmp_path)
    request = Request(vram_gib=6.0)
    path = tmp_path / "grpo.yaml"
    path.write_text(path.read_text() + f"{SHARE}: 0.5\n")
    table = memory_table(read_subject(str(path), request), request, batch_sizes=(1,))
    assert table.available_bytes == 3 * GIB and any("colocated vLLM holds 3.00 GiB" in note for note in table.notes)


@pytest.mark.slow
def test_a_plan_stays_within_what_vllm_leaves(tmp_path: Path) -> None:
    made = planned(tmp_path, **{SHARE: 0.5})
    facts = made.facts
    assert facts.budget_bytes < 3 * GIB
    assert [phase.name for phase in facts.phases] == ["weight sync", "generate", "score", "train"]
    assert max(phase.total_bytes for phase in facts.phases) <= 0.94 * 6 * GIB
    assert any(one["what"] == "vLLM" for one in made.to_json()["assumed"])
    assert "vLLM 3.00 GiB" in made.report(verbose=True)
    assert made.to_json()["phases"][3]["vllm_bytes"] == facts.phases[3].vllm_bytes == 3 * GIB
    alone = planned(tmp_path, use_vllm=False)
    assert facts.after.memory.device_bytes <= facts.budget_bytes < alone.facts.budget_bytes and alone.facts.phases == ()


@pytest.mark.slow
def test_a_sleeping_vllm_leaves_the_training_all(tmp_path: Path) -> None:
    facts = planned(tmp_path, **{SHARE: 0.5, SLEEP: True}).facts
    assert facts.budget_bytes > 5 * GIB
    sync, generate, score, train = facts.phases
    assert generate.vllm_bytes == 3 * GIB > sync.vllm_bytes > 0 == score.vllm_bytes == train.vllm_bytes


@pytest.mark.slow
def test_the_share_that_would_do_is_named(tmp_path: Path) -> None:
    notes = planned(tmp_path, **{SHARE: 0.6}).facts.notes
    assert any(note.startswith(f"{SHARE}: 0.2 would hold all 64 at once") for note in notes)
    with pytest.raises(NothingFits, match="does not hold its copy of the weights") as ended:
        planned(tmp_path, **{SHARE: 0.1})
    assert f"{SHARE}: 0.2" in (ended.value.hint or "")
