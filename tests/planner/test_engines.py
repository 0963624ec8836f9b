"""Several devices: which engine is taken, what is written for it, and what is said of the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from versions import needs_5

from hfopt.config.settings import with_raw
from hfopt.errors import ConfigError, NothingFits
from hfopt.job.subject import Subject, from_file
from hfopt.memory.step_memory import Estimate, estimate
from hfopt.planner import Plan, Request, plan
from hfopt.planner.engines import block_classes, engine_args, engine_of, named_engine, plan_devices
from hfopt.schema import StepSettings, Workload

CARD = "GeForce RTX 3060"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16_000, "dtype": "float32", **sizes}
    (path / "config.json").write_text(json.dumps(config))
    return path


_traces: dict[tuple[str, StepSettings], Estimate] = {}


def remembered(workload: Workload, settings: StepSettings) -> Estimate:
    key = (workload.name, settings)
    if key not in _traces:
        _traces[key] = estimate(workload, settings)
    return _traces[key]


def written(folder: Path, **write: Any) -> Path:
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True, "gradient_checkpointing": False}
    lines = {"model_name_or_path": str(folder), "max_length": 32, "output_dir": "out", **keys, **write}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(lines))
    return path


def made(folder: Path, *, write: Mapping[str, Any] | None = None, **request: Any) -> Plan:
    keep = frozenset({"gradient_checkpointing", "bf16"})
    wishes = Request(**{"gpu": CARD, "num_gpus": 4, "dry_run": False, "keep": keep, **request})
    return plan(written(folder, **(write or {})), wishes, estimator=remembered)


@pytest.mark.slow
def test_ddp_is_taken_when_the_model_fits(folder: Path) -> None:
    result = made(folder)
    choice = result.facts.engine
    assert choice is not None and choice.name == "DDP"
    assert "torchrun --nproc_per_node 4 train.py train.yaml" in choice.commands
    assert not {"fsdp", "deepspeed"} & {change.key for change in result.facts.changes}
    assert result.started_with("out.yaml").facts.engine.commands[1].endswith("train.py out.yaml")  # type: ignore[union-attr]


@pytest.mark.slow
def test_fsdp_is_written_when_ddp_does_not_fit(folder: Path) -> None:
    result = made(folder, vram_gib=0.75)
    choice = result.facts.engine
    assert choice is not None and choice.name == "FSDP2"
    assert "DDP" in [name for name, _ in choice.rejected]
    config = yaml.safe_load(result.to_yaml())
    assert config["fsdp"] is True
    assert config["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    assert not result.facts.before.fits and result.facts.after.fits
    batch = config["per_device_train_batch_size"] * config.get("gradient_accumulation_steps", 1) * 4
    assert batch == result.facts.effective_batch == 32


def test_an_engine_that_is_asked_for_is_used_and_its_file_can_stand_beside(folder: Path) -> None:
    result = made(folder, engine="zero2")
    choice = result.facts.engine
    assert choice is not None and choice.name == "ZeRO-2" and choice.deepspeed is not None
    assert choice.deepspeed["zero_optimization"]["stage"] == 2
    assert choice.deepspeed["train_micro_batch_size_per_gpu"] == "auto"
    assert yaml.safe_load(result.to_yaml())["deepspeed"] == choice.deepspeed
    assert yaml.safe_load(result.with_deepspeed_file("x.json").to_yaml())["deepspeed"] == "x.json"


@pytest.mark.slow
def test_an_engine_of_the_config_stays(folder: Path) -> None:
    result = made(folder, write={"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}})
    assert result.facts.engine is not None and result.facts.engine.reason == "the config says so"
    assert not {"fsdp", "fsdp_config"} & {change.key for change in result.facts.changes}


@pytest.mark.slow
def test_ranks_that_share_their_samples_do_not_multiply_the_batch(folder: Path) -> None:
    result = made(folder, model_parallel=2)
    assert result.facts.job.world_size == 2
    assert result.facts.effective_batch == 2 * 4 * 2


@pytest.mark.slow
def test_more_machines_meet_over_their_network(folder: Path) -> None:
    result = made(folder, nodes=2, link="network:100Gbit/s")
    assert result.facts.engine is not None
    assert any("--nnodes 2" in command for command in result.facts.engine.commands)
    assert any("100 Gbit/s" in note for note in result.facts.notes)
    assert result.facts.job.world_size == 8


@pytest.mark.slow
def test_a_link_is_said_to_change_nothing_for_one_device(folder: Path) -> None:
    said = [note for note in made(folder, num_gpus=1, link="pcie").facts.notes if "--link pcie" in note]
    assert said == ["--link pcie changes nothing: one device sends nothing to others"]
    assert not any("--link" in note for note in made(folder, link="pcie").facts.notes)


def test_nothing_fits_names_every_engine(folder: Path) -> None:
    def refuses(subject: Subject) -> Plan:
        raise NothingFits("nothing fits: even one sample is too much")

    subject = from_file(written(folder), Request(gpu=CARD, num_gpus=4))
    with pytest.raises(NothingFits) as raised:
        plan_devices(subject, Request(gpu=CARD, num_gpus=4), refuses)
    for name in ("DDP", "FSDP2", "ZeRO-2", "ZeRO-3", "FSDP2 with CPU offload"):
        assert f"{name}: " in str(raised.value)


@pytest.mark.parametrize(("bound", "tried"), [("compute", ["FSDP2"]), ("communication", ["FSDP2", "FSDP2", "ZeRO-2"])])
def test_zero_is_traced_only_where_it_could_win(folder: Path, bound: Any, tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfopt.planner.engines.find_spec", lambda name: object())
    any_plan = made(folder)
    after = any_plan.facts.after
    stand_in = replace(any_plan, facts=replace(any_plan.facts, after=replace(after, time=replace(after.time, bound=bound))))
    asked: list[str] = []

    def one(subject: Subject) -> Plan:
        if engine_of(subject.job.settings.engine) is None:
            raise NothingFits("nothing fits: even one sample is too much")
        asked.append("ZeRO-2" if "deepspeed" in subject.job.raw else "FSDP2")
        return stand_in

    request = Request(gpu=CARD, num_gpus=4)
    choice = plan_devices(from_file(written(folder), request), request, one).facts.engine
    assert asked == tried and choice is not None and choice.name == "FSDP2"
    assert "no less than FSDP2" in dict(choice.rejected)["ZeRO-3"]


@needs_5  # before, the shards are FSDP1's, which sums their norm on the cards
def test_offloaded_gradients_are_summed_on_the_host(folder: Path) -> None:
    job = from_file(written(folder), Request(gpu=CARD, num_gpus=4)).job
    offloaded, plain = (engine_args(named_engine(key), job, ("LlamaDecoderLayer",), adapters=False) for key in ("fsdp2-offload", "fsdp2"))
    assert offloaded["ddp_backend"] == "cuda:nccl,cpu:gloo" and "ddp_backend" not in plain
    own = with_raw(job, {**job.raw, "ddp_backend": "gloo"})
    assert engine_args(named_engine("fsdp2-offload"), own, (), adapters=False)["ddp_backend"] == "gloo"


@pytest.mark.parametrize(
    ("wish", "message"), [({"engine": "magic"}, "not known"), ({"link": "rope"}, "not known"), ({"link": "pcie:fast"}, "not a rate")]
)
def test_unknown_wishes_are_said(folder: Path, wish: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(folder, **wish)


def test_the_repeated_blocks_are_found(folder: Path) -> None:
    assert block_classes(from_file(written(folder), Request(gpu=CARD))) == ("LlamaDecoderLayer",)


def test_offloading_asks_for_the_hosts_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = from_file(written(folder), Request(gpu=CARD, num_gpus=4))
    host = replace(subject.hardware.host, ram_free_bytes=1 << 20)
    short = replace(subject, hardware=replace(subject.hardware, host=host, hypothetical=False))
    with pytest.raises(
        NothingFits, match=r"offloads .* to the host, which has 1\.\d* MiB free|offloads .* to the host, which has 1 MiB free"
    ):
        plan_devices(short, Request(gpu=CARD, num_gpus=4, engine="fsdp2-offload"), lambda one: pytest.fail("it was planned all the same"))
