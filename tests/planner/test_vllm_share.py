"""Colocated vLLM: what it takes of the card, when, and what a share that leaves too little is answered with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt import plan
from hfopt.errors import ConfigError, NothingFits
from hfopt.facts.training_keys import trl_default
from hfopt.hardware.detect import named
from hfopt.planner.grpo import batch_rule, group_size
from hfopt.planner.request import Request
from hfopt.planner.result import Plan
from hfopt.planner.vllm_share import SHARE, SLEEP, colocated_vllm, room_beside
from hfopt.schema import DataSpec, ModelSpec, TrainJob
from hfopt.units import GIB

JOB = TrainJob(
    path=None,
    section=(),
    trainer="GRPO",
    args={"use_vllm": True},
    model=ModelSpec(name=None),
    data=DataSpec(),
    per_device_batch=8,
    accumulation=4,
)
CARD = named("4090").gpus[0]
TOTAL = CARD.usable_bytes or CARD.memory_bytes


def with_args(**args: Any) -> TrainJob:
    return replace(JOB, args={**JOB.args, **args})


def test_the_defaults_are_those_of_the_installed_trl() -> None:
    assert trl_default("GRPO", SHARE) == 0.3 and trl_default("GRPO", "vllm_mode") == "colocate"
    assert trl_default("RLOO", "num_generations") == 2 and trl_default("GRPO", "no such key") is None
    assert trl_default("NoSuchTrainer", SHARE) is None
    assert group_size(JOB) == 8


def test_what_it_takes_and_when() -> None:
    found = colocated_vllm(JOB, CARD)
    assert found is not None and found.share_bytes == int(0.3 * TOTAL) == found.resident_bytes
    assert found.assumed is not None and "default of 0.3" in found.assumed
    asleep = colocated_vllm(with_args(**{SLEEP: True, SHARE: 0.5}), CARD)
    assert asleep is not None and asleep.share_bytes == int(0.5 * TOTAL) and asleep.resident_bytes == 0 and asleep.assumed is None


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
    assert batch_rule(stated).keeps_pair


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


def test_a_plan_stays_within_what_vllm_leaves(tmp_path: Path) -> None:
    made = planned(tmp_path, **{SHARE: 0.5})
    facts = made.facts
    assert facts.budget_bytes < 3 * GIB
    assert [phase.name for phase in facts.phases] == ["weight sync", "generate", "score", "train"]
    assert max(phase.total_bytes for phase in facts.phases) <= 0.94 * 6 * GIB
    assert "train" in made.report() and "vLLM 3.00 GiB" in made.report()
    assert made.to_json()["phases"][3]["vllm_bytes"] == facts.phases[3].vllm_bytes == 3 * GIB
    alone = planned(tmp_path, use_vllm=False)
    assert facts.after.memory.device_bytes <= facts.budget_bytes < alone.facts.budget_bytes and alone.facts.phases == ()


def test_a_sleeping_vllm_leaves_the_training_all(tmp_path: Path) -> None:
    facts = planned(tmp_path, **{SHARE: 0.5, SLEEP: True}).facts
    assert facts.budget_bytes > 5 * GIB
    sync, generate, score, train = facts.phases
    assert generate.vllm_bytes == 3 * GIB > sync.vllm_bytes > 0 == score.vllm_bytes == train.vllm_bytes


def test_the_share_that_would_do_is_named(tmp_path: Path) -> None:
    notes = planned(tmp_path, **{SHARE: 0.6}).facts.notes
    assert any(note.startswith(f"{SHARE}: 0.2 would hold all 64 at once") for note in notes)
    with pytest.raises(NothingFits, match="does not hold its copy of the weights") as ended:
        planned(tmp_path, **{SHARE: 0.1})
    assert f"{SHARE}: 0.2" in (ended.value.hint or "")
