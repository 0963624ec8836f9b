"""FSDP2's own checkpointing in a plan: written for models that draw nothing at random, never beside the Trainer's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from versions import needs_5

from hfopt.job.subject import Subject, from_file
from hfopt.planner import Request, plan
from hfopt.planner.block_recompute import OWN, as_chosen, with_own_checkpointing
from hfopt.schema import Candidate, Checkpointing

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4000, "dtype": "float32", **SIZES}
FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}

KEPT = frozenset({"per_device_train_batch_size", "gradient_accumulation_steps", "bf16"})

pytestmark = needs_5


def yaml_of(folder: Path, model: Mapping[str, Any] = LLAMA, **keys: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(model))
    path = folder / "train.yaml"
    said = {"model_name_or_path": str(folder), "max_length": 512, "output_dir": "out", "per_device_train_batch_size": 8, "bf16": True}
    path.write_text(yaml.safe_dump({**said, **FSDP, **keys}))
    return path


def subject(folder: Path, model: Mapping[str, Any] = LLAMA, *, keep: frozenset[str] = frozenset(), **keys: Any) -> Subject:
    return from_file(yaml_of(folder, model, **keys), Request(gpu="rtx 3060", num_gpus=4, keep=keep))


def writes(one: Subject) -> bool:
    return (with_own_checkpointing(one).job.raw["fsdp_config"] or {}).get(OWN) is True


def test_it_is_written_where_nothing_is_drawn_at_random(tmp_path: Path) -> None:
    assert writes(subject(tmp_path))
    assert not writes(subject(tmp_path, {**LLAMA, "attention_dropout": 0.1}))
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}
    assert writes(subject(tmp_path, **lora, lora_dropout=0.0))
    assert not writes(subject(tmp_path, **lora, lora_dropout=0.05))


def test_what_the_user_says_of_it_stays(tmp_path: Path) -> None:
    assert not writes(subject(tmp_path, fsdp_config={**FSDP["fsdp_config"], OWN: False}))  # type: ignore[dict-item]
    assert not writes(subject(tmp_path, fsdp_config={"version": 1, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
    assert not writes(subject(tmp_path, keep=frozenset({"gradient_checkpointing"})))


def test_a_candidate_that_does_not_use_it_does_not_get_it() -> None:
    before, planned = {"fsdp": True}, {"fsdp": True, "fsdp_config": {"version": 2, OWN: True}}
    every, second, none = (
        Candidate(per_device_batch=1, accumulation=1, precision="bf16", checkpointing=Checkpointing(every_n_layers=n)) for n in (1, 2, 0)
    )
    assert as_chosen(before, planned, every) == planned
    assert as_chosen(before, planned, second) == as_chosen(before, planned, none) == {"fsdp": True, "fsdp_config": {"version": 2}}
    own = {"fsdp": True, "fsdp_config": {OWN: True}}
    assert as_chosen(own, own, none) == own, "what the file has is not taken away"


@pytest.mark.slow
def test_a_plan_writes_it_in_place_of_the_trainers(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, per_device_train_batch_size=64, gradient_checkpointing=True)
    made = plan(path, Request(gpu="rtx 3060", num_gpus=4, dry_run=False, vram_gib=2.5, keep=KEPT))
    config = yaml.safe_load(made.to_yaml())
    assert made.candidate.checkpointing == Checkpointing(every_n_layers=1)
    assert config["fsdp_config"] == {**FSDP["fsdp_config"], OWN: True}  # type: ignore[dict-item]
    assert config["gradient_checkpointing"] is False
    reasons = {change.key: change.reason for change in made.facts.changes}
    assert "refuses both" in reasons["gradient_checkpointing"] and "once less" in reasons["fsdp_config"]
