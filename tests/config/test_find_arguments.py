"""The section that is meant is found among many, and where nothing says which, that is said."""

from __future__ import annotations

import pytest

from hfopt.config.read_job import Loaded, load_bytes
from hfopt.config.yaml_edit import edit
from hfopt.errors import ConfigError
from hfopt.schema import Change

PROFILE = "per_device_train_batch_size: {batch}\n{indent}learning_rate: 1.0e-4\n"


def read(text: str, section: str | None = None) -> Loaded:
    return load_bytes(text.encode(), "c.yaml", section=section)


def profiles(*names: str, under: str = "profiles", head: str = "") -> str:
    body = "".join(f"  {name}:\n    {PROFILE.format(batch=size + 1, indent='    ')}" for size, name in enumerate(names))
    return f"{head}{under}:\n{body}"


def batch(loaded: Loaded) -> int:
    assert loaded.job is not None
    return loaded.job.per_device_batch


def test_one_of_several_profiles_is_asked_for() -> None:
    text = profiles("small", "large")
    loaded = read(text)
    assert loaded.job is None
    (problem,) = [problem for problem in loaded.problems if problem.code == "several_sections"]
    assert problem.severity == "error" and "profiles.small" in problem.message and "profiles.large" in problem.message
    assert batch(read(text, "profiles.large")) == 2


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (profiles("small", "large", head="profile: large\n"), ("profiles", "large")),
        (profiles("small", "default", "large"), ("profiles", "default")),
        ("base: &base\n  learning_rate: 1.0\nmine:\n  <<: *base\n  learning_rate: 2.0\n", ("mine",)),
        ("learning_rate: 2.0\nnum_train_epochs: 1\npresets:\n  small: {learning_rate: 1.0, max_steps: 5, num_train_epochs: 2}\n", ()),
        (
            "training: {learning_rate: 2.0}\nmodels:\n  a: {training: {learning_rate: 1.0}}\n  b: {training: {learning_rate: 3.0}}\n",
            ("training",),
        ),
        ("stage_one: {learning_rate: 1.0}\ntraining: {learning_rate: 2.0}\n", ("training",)),
    ],
)
def test_a_selector_a_merge_or_a_name_decides(text: str, chosen: tuple[str, ...]) -> None:
    loaded = read(text)
    assert loaded.job is not None and loaded.job.section == chosen
    assert [problem.severity for problem in loaded.problems if problem.code == "several_sections"] == ["note"]


def test_a_key_with_dots_in_it_can_be_named() -> None:
    assert batch(read(profiles("Qwen2.5", "Llama-3.1"), "profiles.Llama-3.1")) == 2


def test_facts_come_from_the_profile_that_is_meant() -> None:
    text = (
        "small:\n  model: {name: tiny}\n  training: {per_device_train_batch_size: 1}\n"
        "large:\n  model: {name: huge}\n  training: {per_device_train_batch_size: 2}\n"
    )
    loaded = read(text, "large.training")
    assert loaded.job is not None and loaded.job.model.name == "huge"


def test_a_chosen_preset_stands_on_what_is_around_it() -> None:
    text = (
        "preset: small\nlearning_rate: 2.0\nmax_steps: 7\nbf16: true\n"
        "presets:\n  small: {learning_rate: 1.0}\n  big: {learning_rate: 3.0, lora_r: 4}\n"
    )
    loaded = read(text)
    assert loaded.job is not None and loaded.job.section == ("presets", "small")
    assert loaded.job.raw == {"learning_rate": 1.0, "max_steps": 7, "bf16": True}
    assert loaded.job.model.lora is None
    edited = edit(loaded, [Change(key="max_steps", before=7, after=5, reason="")])
    assert edited.data.decode() == text.replace("{learning_rate: 1.0}", "{learning_rate: 1.0, max_steps: 5}")


def test_a_list_of_jobs_is_addressed_by_position() -> None:
    text = "jobs:\n- name: a\n  per_device_train_batch_size: 1\n- name: b\n  per_device_train_batch_size: 2\n"
    assert batch(read(text, "jobs.1")) == 2


@pytest.mark.parametrize(("section", "message"), [("nowhere", "no section"), ("training.seed", "not a mapping"), ("jobs.9", "no section")])
def test_a_section_that_is_not_there_names_those_that_are(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read("training: {per_device_train_batch_size: 1, seed: 1}\njobs: []\n", section)
    assert caught.value.hint is not None and "training" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("model:\n  _component_: torchtune.models.llama3\nbatch_size: 2\nepochs: 1\n", "torchtune"),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n", "accelerate"),
        ('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}}', "DeepSpeed"),
        ("input_features: []\noutput_features: []\ntrainer: {batch_size: 2, learning_rate: 0.1}\n", "ludwig"),
    ],
)
def test_configs_of_other_tools_are_refused_by_name(text: str, tool: str) -> None:
    with pytest.raises(ConfigError, match=tool):
        read(text)


def test_a_yaml_without_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="no TrainingArguments"):
        read("title: words\nseed: 1\n")


def test_mappings_inside_an_argument_are_not_sections() -> None:
    loaded = read("learning_rate: 0.1\nnum_train_epochs: 1\ndeepspeed:\n  gradient_accumulation_steps: auto\n  train_batch_size: auto\n")
    assert loaded.job is not None and loaded.job.section == () and loaded.job.accumulation == 1
    assert loaded.problems == ()


@pytest.mark.parametrize(("key", "size"), [("per-device-train-batch-size", 8), ("batch-size", 8)])
def test_names_with_dashes_are_those_of_a_command_line(key: str, size: int) -> None:
    text = f"model-name: gpt2\nmax-length: 64\n{key}: {size}\nlearning-rate: 1.0e-4\n"
    loaded = read(text)
    assert batch(loaded) == size and loaded.job is not None and loaded.job.data.max_length == 64 and loaded.job.model.name == "gpt2"
    changed = edit(loaded, [Change(key="per_device_train_batch_size", before=size, after=4, reason="")])
    assert changed.data.decode() == text.replace(f"{key}: {size}", f"{key}: 4")


def test_a_gone_key_in_a_section_of_another_program_is_none_of_ours() -> None:
    text = "per_device_train_batch_size: 4\nlearning_rate: 1.0e-4\n"
    assert not read(text + "test_vllm: {tp_size: 2}\n").problems
    assert any(problem.key == "tp_size" for problem in read(text + "engine: {tp_size: 2}\n").problems)
