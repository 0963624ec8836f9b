"""TrainingArguments of other versions: which keys a file may use there, and what is repaired for which."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.config.read_job import load_bytes
from hfopt.config.yaml_edit import upgrade
from hfopt.errors import ConfigError
from hfopt.facts.argument_effects import OPTIMS, SPANS, as_of, minor_of
from hfopt.facts.training_keys import installed

CONFIGS = Path(__file__).parents[2] / "configs"


def written(text: str, version: str) -> tuple[str, list[str]]:
    """The file as it is repaired for that version, and the errors that are left."""
    repaired = upgrade(load_bytes(text.encode(), "c.yaml", for_transformers=version)).data
    left = load_bytes(repaired, "c.yaml", for_transformers=version).problems
    return repaired.decode(), [problem.message for problem in left if problem.severity == "error"]


def test_the_installed_version_is_what_it_is() -> None:
    assert as_of(None) is installed()
    here = as_of(".".join(installed().version.split(".")[:2]))
    assert here is installed()
    gone = [key for key in SPANS if key in installed().fields and SPANS[key].until is not None and minor_of(installed().version) >= (5, 15)]
    assert not gone


@pytest.mark.parametrize(
    ("version", "has", "has_not"),
    [
        ("4.40", {"evaluation_strategy", "warmup_ratio", "no_cuda"}, {"eval_strategy", "use_liger_kernel", "include_for_metrics"}),
        (
            "4.57.1",
            {"eval_strategy", "warmup_ratio", "group_by_length", "overwrite_output_dir", "project"},
            {"evaluation_strategy", "use_cache"},
        ),
        ("5.10", {"warmup_ratio", "train_sampling_strategy"}, {"group_by_length", "no_cuda", "dataloader_in_order"}),
        ("5.16", {"train_sampling_strategy", "dataloader_in_order"}, {"warmup_ratio", "logging_dir"}),
    ],
)
def test_keys_come_and_go(version: str, has: set[str], has_not: set[str]) -> None:
    fields = as_of(version).fields
    assert has <= fields.keys() and not has_not & fields.keys()


def test_optimizers_come_and_go() -> None:
    assert "adamw_hf" in as_of("4.45").fields["optim"].choices and "stable_adamw" not in as_of("4.45").fields["optim"].choices
    assert "adamw_hf" not in as_of("4.57").fields["optim"].choices and "stable_adamw" in as_of("4.57").fields["optim"].choices
    assert all(span.since is None or span.until is None for span in OPTIMS.values())


@pytest.mark.parametrize("version", ["", "four", "3.9", "4.39", "9.1"])
def test_a_version_that_is_not_known_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match="--for-transformers"):
        as_of(version)


def test_what_a_version_still_has_is_left_as_it_spells_it() -> None:
    text = (CONFIGS / "old_style.yaml").read_text()
    for_457, errors = written(text, "4.57")
    assert not errors and "warmup_ratio: 0.1" in for_457 and "overwrite_output_dir: true" in for_457
    assert "eval_strategy: epoch" in for_457 and "\nevaluation_strategy" not in for_457
    for_445, errors = written(text, "4.45")
    assert not errors and "evaluation_strategy: epoch" in for_445 and "learning_rate: 5.0e-5" in for_445


def test_a_newer_file_is_written_back() -> None:
    head = "output_dir: o\nper_device_train_batch_size: 8\n"
    text = f"{head}warmup_steps: 0.1\ntrain_sampling_strategy: group_by_length\neval_strategy: epoch\n"
    back, errors = written(text, "4.40")
    assert not errors and back == f"{head}warmup_ratio: 0.1\ngroup_by_length: true\nevaluation_strategy: epoch\n"
    assert written(f"{head}train_sampling_strategy: random\nwarmup_steps: 100\n", "4.57") == (f"{head}warmup_steps: 100\n", [])
    _, errors = written(f"{head}dataloader_in_order: true\n", "4.57")
    assert errors == ["dataloader_in_order is newer than transformers 4.57"]
