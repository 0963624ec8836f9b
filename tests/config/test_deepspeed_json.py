"""Where a DeepSpeed JSON is looked for, what a name stands for, and what is said when it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfopt.config.deepspeed_json import by_its_name, config_mapping, is_missing, zero_defaults
from hfopt.config.read_job import load
from hfopt.config.settings import sharding_of, trainer_settings
from hfopt.errors import ConfigError

STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The YAML stands two folders below the one that its path counts from."""
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "z2.json").write_text(json.dumps(STAGE_2))
    folder = tmp_path / "configs" / "sft"
    folder.mkdir(parents=True)
    return folder


def test_folders_above_the_yaml_are_looked_in(repository: Path) -> None:
    assert config_mapping("ds/z2.json", "deepspeed", repository) == STAGE_2
    assert not is_missing("ds/z2.json", repository) and is_missing("ds/z3.json", repository)
    assert not is_missing(STAGE_2, repository) and not is_missing(None, repository)


@pytest.mark.parametrize(
    ("name", "engine", "offloads"), [("zero2", "zero2", False), ("zero3", "zero3", False), ("zero3_offload", "zero3", True)]
)
def test_names_of_ms_swift(name: str, engine: str, offloads: bool) -> None:
    found = sharding_of(trainer_settings({"deepspeed": name}).engine, world_size=4, hidden_size=64)
    assert found is not None and (found.engine, found.offload_optimizer, found.offload_parameters) == (engine, offloads, offloads)


@pytest.mark.parametrize(
    ("name", "stage", "offloads"),
    [
        ("examples/deepspeed/ds_z3_config.json", 3, False),
        ("ds_z2_offload_config.json", 2, True),
        ("configs/zero3.json", 3, False),
        ("ds_config_stage_2.json", 2, False),
        ("deepspeed_zero1.json", 1, False),
    ],
)
def test_a_name_says_the_stage(name: str, stage: int, offloads: bool) -> None:
    found = by_its_name(name)
    assert found is not None and found["zero_optimization"]["stage"] == stage
    assert ("offload_optimizer" in found["zero_optimization"]) is offloads


@pytest.mark.parametrize("name", ["ds_config.json", "blitz3.json", "zero30.json", None, {"zero_optimization": {}}])
def test_a_name_that_says_no_stage(name: object) -> None:
    assert by_its_name(name) is None


def test_one_device_keeps_deepspeeds_copies() -> None:
    alone = sharding_of(trainer_settings({"deepspeed": STAGE_2}).engine, world_size=1, hidden_size=64)
    assert alone is not None and (alone.engine, alone.world_size) == ("zero2", 1)
    assert sharding_of(trainer_settings({"deepspeed": {"zero_optimization": {"stage": 0}}}).engine, world_size=1) is None


def test_a_file_that_is_not_there_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"deepspeed: nowhere\.json is not there") as ended:
        config_mapping("nowhere.json", "deepspeed", None)
    assert "--assume-zero 3" in (ended.value.hint or "")
    with pytest.raises(ConfigError) as other:
        config_mapping("nowhere.json", "fsdp_config", None)
    assert "--assume-zero" not in (other.value.hint or "")


def test_check_finds_it(repository: Path) -> None:
    path = repository / "train.yaml"
    text = "model_name_or_path: gpt2\noutput_dir: o\nper_device_train_batch_size: 4\ndeepspeed: {}\n"
    path.write_text(text.format("ds/gone.json"))
    (problem,) = [one for one in load(path).problems if one.code == "missing_file"]
    assert problem.severity == "warning" and problem.place is not None and problem.place.line == 4
    path.write_text(text.format("ds/z2.json"))
    assert not [one for one in load(path).problems if one.code == "missing_file"]


def test_the_defaults_of_a_stage() -> None:
    found = sharding_of(trainer_settings({"deepspeed": zero_defaults(3)}).engine, world_size=2, hidden_size=100)
    assert found is not None and found.zero.reduce_bucket == 10_000 and found.zero.persistence_threshold == 1000
