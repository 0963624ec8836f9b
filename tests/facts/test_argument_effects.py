"""Every argument of the installed trainers has a class, and those that the figures do not show are named when they are set."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hfopt.facts.argument_effects import TRL_CONFIGS, effects, fields_of, not_modelled
from hfopt.facts.training_keys import trl_config


def _config_class(trainer: str) -> Any:
    import transformers

    if trainer in TRL_CONFIGS:
        trl = pytest.importorskip("trl")
        return getattr(trl, f"{trainer}Config")
    return transformers.Seq2SeqTrainingArguments if trainer == "Seq2SeqTrainer" else transformers.TrainingArguments


@pytest.mark.parametrize("trainer", ["Trainer", "Seq2SeqTrainer", *TRL_CONFIGS])
def test_every_field_of_the_installed_config_has_a_class(trainer: str) -> None:
    fields = {item.name for item in dataclasses.fields(_config_class(trainer)) if item.init}
    assert sorted(fields - effects().keys()) == []
    assert sorted(fields - fields_of(trainer).keys()) == [], "the source is read as the class is made"


def test_no_reason_is_missing() -> None:
    assert all(found.why for found in effects().values())
    assert {found.effect for found in effects().values()} == {"modelled", "neutral", "named"}


@pytest.mark.parametrize(
    ("trainer", "args", "named"),
    [
        ("SFT", {"activation_offloading": True}, ["activation_offloading: true"]),
        ("SFT", {"activation_offloading": False, "bf16": True, "logging_steps": 1}, []),
        ("Trainer", {"auto_find_batch_size": True, "learning_rate": 1e-4}, ["auto_find_batch_size: true"]),
        ("Trainer", {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}, []),
        ("Trainer", {"skip_memory_metrics": True, "debug": "", "parallelism_config": {}}, []),  # as they are by default
        ("Trainer", {"skip_memory_metrics": False}, ["skip_memory_metrics: false"]),
        ("Seq2SeqTrainer", {"predict_with_generate": True, "generation_config": "a/b"}, ["generation_config: a/b"]),
        ("GRPO", {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5}, []),  # the budget is less by it
        ("DPO", {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 64}, ["precompute_ref_batch_size: 64"]),
        ("Trainer", {"bf16_full_eval": True}, []),  # no weights are cast while it trains
        ("Trainer", {"a_key_of_nobody": 3}, []),
    ],
)
def test_what_the_figures_do_not_show_is_named_when_it_is_set(trainer: str, args: dict[str, Any], named: list[str]) -> None:
    said = list(not_modelled(args, trainer))
    assert [sentence.partition(" is set; ")[0] for sentence in said] == named
    assert all(sentence.partition(" is set; ")[2] for sentence in said)


def test_defaults_of_trl_are_read_from_its_source() -> None:
    pytest.importorskip("trl")
    assert trl_config("SFT")["activation_offloading"].default is False
    assert trl_config("SFT")["gradient_checkpointing"].default is True  # TRL's own default
    assert trl_config("NoSuch").keys() == trl_config("SFT").keys() & trl_config("NoSuch").keys()


def test_entries_inside_an_argument_are_named_too() -> None:
    args = {
        "gradient_checkpointing_kwargs": {"offload": True},
        "fsdp_config": {"activation_checkpointing": True, "reshard_after_forward": True},
    }
    said = list(not_modelled(args, "Trainer"))
    assert [sentence.partition(" is set")[0] for sentence in said] == [
        "gradient_checkpointing_kwargs: offload",
        "fsdp_config: activation_checkpointing",
    ]
    assert list(not_modelled({"fsdp_config": {"activation_checkpointing": True}}, "Trainer", ranks=4)) == []
    assert list(not_modelled({"gradient_checkpointing_kwargs": {"offload": False}, "fsdp_config": "fsdp.json"}, "Trainer")) == []
