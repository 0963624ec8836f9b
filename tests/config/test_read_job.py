"""A config is found wherever it is, read with right types, and everything wrong with it is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.config.read_job import Loaded, load, load_bytes
from hfopt.config.yaml_edit import edit
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import installed
from hfopt.schema import Change, Checkpointing, TrainJob


def read(text: str, **options: object) -> Loaded:
    return load_bytes(text.encode(), "config.yaml", **options)  # type: ignore[arg-type]


def job_of(text: str, **options: object) -> TrainJob:
    job = read(text, **options).job
    assert job is not None
    return job


def codes(loaded: Loaded) -> list[str]:
    return [problem.code for problem in loaded.problems]


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n", ()),
        ("training:\n  per_device_train_batch_size: 4\n  gradient_accumulation_steps: 2\n", ("training",)),
        ("TrainingArguments: {per_device_train_batch_size: 4, gradient_accumulation_steps: 2}\n", ("TrainingArguments",)),
        (
            "seed: 1\ntrainer:\n  name: x\n  args:\n    per_device_train_batch_size: 4\n    gradient_accumulation_steps: 2\n",
            ("trainer", "args"),
        ),
    ],
)
def test_the_arguments_are_found_wherever_they_are(text: str, section: tuple[str, ...]) -> None:
    job = job_of(text, world_size=3)
    assert job.section == section
    assert (job.per_device_batch, job.accumulation, job.effective_batch) == (4, 2, 24)


def test_arguments_split_over_sections_are_one_job() -> None:
    job = job_of(
        "model:\n  name: bert-base-uncased\noptimizer:\n  learning_rate: 2.0e-5\n  weight_decay: 0.01\n"
        "training:\n  per_device_train_batch_size: 4\n  num_train_epochs: 3\nlogging:\n  logging_steps: 10\n"
    )
    assert job.raw == {
        "learning_rate": 2e-5,
        "weight_decay": 0.01,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 3,
        "logging_steps": 10,
    }
    assert job.model.name == "bert-base-uncased"


def test_defaults_count_when_nothing_is_set() -> None:
    assert job_of("learning_rate: 1.0e-5\nnum_train_epochs: 1\n").effective_batch == 8


def test_all_problems_at_once_with_their_places() -> None:
    loaded = read(
        "output_dir: out\n"
        "learning_rate: 5e-5\n"
        "evaluation_strategy: steps\n"
        "per_device_train_batchsize: 4\n"
        "save_total_limit: two\n"
        "max_steps: null\n"
        "seed: 1\n"
        "seed: 2\n"
    )
    found = {problem.code: problem for problem in loaded.problems}
    assert {"number_as_string", "renamed_key", "unknown_key", "wrong_type", "null_value", "duplicate_key"} == set(found)
    assert [problem.place.line for problem in loaded.problems if problem.place] == [2, 3, 4, 5, 6, 8]
    assert found["unknown_key"].fix is not None and "per_device_train_batch_size" in found["unknown_key"].fix
    assert found["number_as_string"].fix == "learning_rate: 5.0e-5"
    assert loaded.job is not None and loaded.job.raw["learning_rate"] == 5e-5
    assert loaded.job.raw["eval_strategy"] == "steps" and loaded.job.raw["seed"] == 2


def test_a_batch_that_cannot_be_read_leaves_no_job() -> None:
    loaded = read("per_device_train_batch_size: ${oc.env:BATCH}\nlearning_rate: 0.1\n")
    assert loaded.job is None and codes(loaded) == ["unresolved"]


def test_an_interpolation_into_the_same_file_is_followed() -> None:
    job = job_of("size: 16\ntraining:\n  per_device_train_batch_size: ${size}\n  learning_rate: 0.1\n")
    assert job.per_device_batch == 16


def test_a_missing_file_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nowhere.yaml")


def test_kept_keys_are_marked_by_comments() -> None:
    job = job_of(
        "per_device_train_batch_size: 4  # hfopt: keep\n# hfopt: keep\noptim: sgd\nbf16: true # keep\n"
        "lr: 0.1\n# hfopt: keep lr, max_steps\nmax_steps: 3\n"
    )
    assert job.kept == {"per_device_train_batch_size", "optim", "learning_rate", "max_steps"}


def test_an_anchor_shared_by_profiles_is_reported_once_and_where_it_stands() -> None:
    loaded = read(
        "base: &base\n  evaluation_strategy: steps\n"
        "a:\n  <<: *base\n  per_device_train_batch_size: 1\nb:\n  <<: *base\n  per_device_train_batch_size: 2\n"
    )
    assert [problem.place.line for problem in loaded.problems if problem.code == "renamed_key" and problem.place] == [2]


def test_two_thousand_keys_are_no_burden() -> None:
    extra = "".join(f"some_unknown_key_{number}: {number}\n" for number in range(2000))
    loaded = read("per_device_train_batch_size: 4\nlearning_rate: 0.1\n" + extra)
    assert loaded.problems == () and loaded.job is not None


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_is_read_and_written_under_either_name(name: str) -> None:
    text = f"model_name_or_path: gpt2\noutput_dir: o\n{name}: true\n{name}_kwargs: {{every_n_layers: 2, use_reentrant: false}}\n"
    loaded = read(text)
    assert loaded.job is not None and loaded.job.settings.checkpointing == Checkpointing(every_n_layers=2)
    if name in installed().fields:
        assert loaded.problems == ()
        changed = edit(loaded, [Change(key="gradient_checkpointing", before=True, after=False, reason="")])
        assert changed.data.decode() == text.replace(f"{name}: true", f"{name}: false")
    else:
        assert {problem.code for problem in loaded.problems} == {"newer_key"}


def test_of_both_names_the_new_one_counts_and_a_file_for_an_older_version_gets_the_old_one() -> None:
    if "activation_checkpointing" in installed().fields:
        both = read("output_dir: o\ngradient_checkpointing: true\nactivation_checkpointing: false\n")
        assert both.job is not None and not both.job.settings.checkpointing.on
    older = read("output_dir: o\nmax_steps: 3\nactivation_checkpointing: true\n", for_transformers="4.57")
    assert [problem.fix for problem in older.problems] == ["gradient_checkpointing: true"]
