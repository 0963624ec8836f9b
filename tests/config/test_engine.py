"""What `fsdp`, `fsdp_config` and `deepspeed` say about the ranks of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfopt.config.settings import model_parallel_of, sharding_of, trainer_settings
from hfopt.errors import ConfigError
from hfopt.schema import Sharding


def read(args: dict[str, Any], **options: Any) -> Sharding:
    found = sharding_of(trainer_settings(args).engine, world_size=4, **options)
    assert found is not None
    return found


def test_one_device_shares_nothing() -> None:
    assert sharding_of(trainer_settings({"fsdp": True}).engine, world_size=1) is None


@pytest.mark.parametrize(
    ("fsdp", "engine"), [(None, "ddp"), (False, "ddp"), ("", "ddp"), (True, "fsdp2"), ("full_shard auto_wrap", "fsdp2")]
)
def test_fsdp_is_on_only_when_it_is_said(fsdp: Any, engine: str) -> None:
    assert read({"fsdp": fsdp, "fsdp_config": {"version": 2}}).engine == engine


def test_options_of_fsdp_in_their_old_and_new_places() -> None:
    new = read(
        {"fsdp": True, "fsdp_config": {"reshard_after_forward": False, "cpu_offload": True, "transformer_layer_cls_to_wrap": "Block"}}
    )
    old = read({"fsdp": "shard_grad_op offload auto_wrap", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["Block"]}})
    assert new == old
    assert (new.reshard_after_forward, new.offload_parameters, new.wrap) == (False, True, ("Block",))


def test_syncing_each_batch_is_read_from_the_accelerator_config() -> None:
    config = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert read({"fsdp": True, "accelerator_config": config}).sync_each_batch
    assert not read({"fsdp": True}).sync_each_batch


def test_auto_sizes_follow_the_hidden_size(tmp_path: Path) -> None:
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    found = read({"deepspeed": "ds.json"}, hidden_size=100, folder=tmp_path)
    assert found.engine == "zero3"
    assert (found.zero.reduce_bucket, found.zero.prefetch_bucket, found.zero.persistence_threshold) == (10_000, 9_000, 1_000)


def test_sizes_that_are_given_stay_and_offloading_is_seen() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 2e8, "offload_optimizer": {"device": "cpu"}}
    found = read({"deepspeed": {"zero_optimization": zero}}, hidden_size=100)
    assert (found.engine, found.zero.reduce_bucket, found.offload_optimizer, found.offload_parameters) == (
        "zero2",
        200_000_000,
        True,
        False,
    )


def test_a_missing_deepspeed_file_is_said() -> None:
    with pytest.raises(ConfigError, match="is not there"):
        read({"deepspeed": "nowhere.json"})


def test_ranks_that_share_samples_are_counted() -> None:
    assert model_parallel_of(trainer_settings({}).engine) == 1
    assert model_parallel_of(trainer_settings({"parallelism_config": {"tp_size": 2, "cp_size": 2, "dp_shard_size": 4}}).engine) == 4
    assert (
        model_parallel_of(trainer_settings({"deepspeed": {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 4}}}).engine) == 8
    )
