"""`accelerate config` files: engine, processes and precision; torchtune's recipes: recognised, with what could be planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hfopt.config.other_tools import hub_id
from hfopt.config.read_job import load_bytes
from hfopt.config.translation import AccelerateFile, launched_by, read_accelerate_file
from hfopt.errors import ConfigError
from hfopt.job.request import Request, launched
from hfopt.schema import TrainJob

HEAD = "compute_environment: LOCAL_MACHINE\nmachine_rank: 0\nnum_machines: 1\nnum_processes: 8\n"
FSDP = HEAD + (
    "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
    "  fsdp_offload_params: true\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
)
ZERO = HEAD + (
    "distributed_type: DEEPSPEED\nmixed_precision: 'no'\ndeepspeed_config:\n  zero_stage: 3\n  offload_optimizer_device: cpu\n"
    "  offload_param_device: none\n  zero3_init_flag: true\n"
)
CONFIG = "model_name_or_path: m\nper_device_train_batch_size: 2\nlearning_rate: 5.0e-5\noutput_dir: o\n"


def read(folder: Path, text: str) -> AccelerateFile:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return read_accelerate_file(path)


def job_of(text: str) -> TrainJob:
    job = load_bytes(text.encode(), "c.yaml").job
    assert job is not None
    return job


def test_fsdp(tmp_path: Path) -> None:
    file = read(tmp_path, FSDP)
    assert (file.processes, file.machines, file.per_machine) == (8, 1, 8)
    assert file.arguments["bf16"] is True and file.arguments["fsdp"] == "full_shard auto_wrap"
    assert file.arguments["fsdp_config"]["offload_params"] is True and file.arguments["fsdp_config"]["version"] == 2


def test_deepspeed(tmp_path: Path) -> None:
    found = read(tmp_path, ZERO).arguments
    zero = found["deepspeed"]["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_optimizer"] == {"device": "cpu"} and "offload_param" not in zero
    assert "bf16" not in found and "fp16" not in found
    named = ZERO.replace("  zero_stage: 3\n", "  deepspeed_config_file: ds.json\n")
    assert read(tmp_path, named).arguments["deepspeed"] == "ds.json"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("distributed_type: MULTI_GPU\nmixed_precision: fp16\n", {"fp16": True}),
        ("distributed_type: 'NO'\nmixed_precision: no\n", {}),
        ("distributed_type: MULTI_GPU\nmixed_precision: fp8\n", {"bf16": True}),
        ("distributed_type: NO\nuse_cpu: true\n", {"use_cpu": True}),
        (
            "distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}\n",
            {"torch_compile": True, "torch_compile_backend": "inductor"},
        ),
        (
            "distributed_type: NO\ndynamo_config: {dynamo_backend: AOT_EAGER, dynamo_mode: reduce-overhead}\n",
            {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_mode": "reduce-overhead"},
        ),
        ("distributed_type: NO\ndynamo_config: {dynamo_backend: 'NO', dynamo_mode: max-autotune}\n", {}),
        ("distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_tp_size: 2}\n", {"parallelism_config": {"tp_size": 2}}),
    ],
)
def test_precision_and_the_rest(tmp_path: Path, lines: str, expected: dict[str, Any]) -> None:
    assert read(tmp_path, HEAD + lines).arguments == expected


def test_what_of_a_compile_is_not_modelled_is_said(tmp_path: Path) -> None:
    dynamo = "dynamo_backend: INDUCTOR, dynamo_use_regional_compilation: true, dynamo_use_dynamic: true"
    (regional, dynamic) = read(tmp_path, HEAD + f"distributed_type: NO\ndynamo_config: {{{dynamo}}}\n").notes
    assert "whole model were compiled at once" in regional and "one shape" in dynamic
    assert read(tmp_path, HEAD + "distributed_type: NO\ndynamo_config: {dynamo_backend: INDUCTOR}\n").notes == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CONFIG, "no file of `accelerate config`"),
        (HEAD + "distributed_type: TPU\n", "not planned"),
        (HEAD + "distributed_type: SPACESHIP\n", "not known"),
        (HEAD.replace("8", "many") + "distributed_type: MULTI_GPU\n", "whole number"),
        (HEAD + "distributed_type: MULTI_GPU\nmixed_precision: int3\n", "mixed_precision"),
        (HEAD + "distributed_type: FSDP\nfsdp_config: yes\n", "not a mapping"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, text)


def test_processes_become_devices_unless_the_request_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(FSDP.replace("num_machines: 1", "num_machines: 2"))
    made = launched(Request(gpu="a100", accelerate=path))
    assert (made.num_gpus, made.nodes) == (4, 2)
    assert launched(Request(gpu="a100", accelerate=path, num_gpus=3)).num_gpus == 3


def test_the_arguments_own_settings_come_first(tmp_path: Path) -> None:
    file = read(tmp_path, FSDP)
    bare, notes = launched_by(job_of(CONFIG), file)
    assert bare.raw["bf16"] is True and bare.raw["fsdp"] == "full_shard auto_wrap" and notes == ()
    assert bare.settings.precision == "bf16" and bare.settings.engine.fsdp is not None
    own, said = launched_by(job_of(CONFIG + "fp16: true\ndeepspeed: zero2\n"), file)
    assert own.raw["fp16"] is True and "bf16" not in own.raw and "fsdp" not in own.raw
    assert len(said) == 1 and "comes before" in said[0]


def test_an_accelerate_file_in_the_configs_place_is_told_where_it_goes() -> None:
    with pytest.raises(ConfigError) as caught:
        load_bytes(FSDP.encode(), "a.yaml")
    assert caught.value.hint is not None and "--accelerate a.yaml" in caught.value.hint


@pytest.mark.parametrize(
    ("builder", "name"),
    [
        ("llama3_1_8b", "meta-llama/Llama-3.1-8B"),
        ("llama2_7b", "meta-llama/Llama-2-7b-hf"),
        ("qwen2_5_0_5b", "Qwen/Qwen2.5-0.5B"),
        ("qwen3_1_7b_instruct", "Qwen/Qwen3-1.7B"),
        ("gemma2_9b", "google/gemma-2-9b"),
        ("phi3_mini", "microsoft/Phi-3-mini-4k-instruct"),
        ("llama2_classifier", None),
    ],
)
def test_torchtunes_builders_name_models(builder: str, name: str | None) -> None:
    assert hub_id(builder) == name


def test_torchtune_is_answered_with_what_could_be_planned() -> None:
    text = "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\nbatch_size: 2\ngradient_accumulation_steps: 8\nepochs: 1\n"
    with pytest.raises(ConfigError, match="torchtune that trains lora_llama3_1_8b with batch 2 × 8") as caught:
        load_bytes(text.encode(), "c.yaml")
    assert caught.value.hint is not None and "hfopt estimate meta-llama/Llama-3.1-8B" in caught.value.hint
