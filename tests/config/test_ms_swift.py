"""ms-swift's files: its own defaults, its own parser, and nothing repaired that it reads."""

from __future__ import annotations

import pytest

from hfopt.config.read_job import Loaded, load_bytes
from hfopt.config.yaml_edit import upgrade
from hfopt.schema import TrainJob

LORA = "model: Qwen/Qwen2.5-7B-Instruct\ntrain_type: lora\ntorch_dtype: bfloat16\nmax_length: 2048\nlearning_rate: 1e-4\n"


def read(text: str, world_size: int = 1) -> Loaded:
    return load_bytes(text.encode(), "swift.yaml", world_size=world_size)


def job(text: str, world_size: int = 1) -> TrainJob:
    found = read(text, world_size).job
    assert found is not None
    return found


def test_its_defaults_are_in_force() -> None:
    found = job(LORA)
    assert (found.tool, found.trainer, found.uses_trl) == ("ms-swift", "SFT", False)
    assert (found.per_device_batch, found.accumulation, found.settings.evaluation.batch) == (1, 16, 1)
    assert found.settings.precision == "bf16" and found.settings.checkpointing.on
    assert found.model.lora is not None and (found.model.lora.r, found.model.lora.alpha) == (8, 32.0)
    assert found.model.frozen_parts == ("vision", "projector")


@pytest.mark.parametrize(("batch", "world_size", "accumulation"), [(1, 1, 16), (4, 2, 2), (3, 1, 6), (32, 1, 1)])
def test_an_optimizer_step_has_16_samples_unless_the_file_says_otherwise(batch: int, world_size: int, accumulation: int) -> None:
    assert job(f"{LORA}per_device_train_batch_size: {batch}\n", world_size).accumulation == accumulation
    assert job(f"{LORA}gradient_accumulation_steps: 5\n").accumulation == 5


@pytest.mark.parametrize(
    ("lines", "precision"),
    [("torch_dtype: float16", "fp16"), ("bf16: false", "fp32"), ("gradient_checkpointing: false", "bf16")],
)
def test_what_the_file_says_counts(lines: str, precision: str) -> None:
    found = job(LORA.replace("torch_dtype: bfloat16", lines))
    assert found.settings.precision == precision
    assert found.settings.checkpointing.on is ("gradient_checkpointing" not in lines)


def test_keys_that_trl_or_transformers_dropped_are_its_own() -> None:
    text = LORA + "rlhf_type: dpo\nrpo_alpha: 0.1\nwarmup_ratio: 0.05\nmax_prompt_length: 512\n"
    loaded = read(text)
    assert job(text).trainer == "DPO"
    assert not [problem for problem in loaded.problems if problem.severity != "note"]
    assert upgrade(loaded).data == text.encode()


def test_grpo_keeps_a_reference_and_vllms_share_unless_told_otherwise() -> None:
    text = "rlhf_type: grpo\nmodel: Qwen/Qwen2.5-0.5B\ntrain_type: full\nuse_vllm: true\nvllm_mode: colocate\nmax_steps: 5\n"
    found = job(text)
    assert found.model.reference is True and found.accumulation == 1
    rollout = found.settings.rollout
    assert (rollout.generations, rollout.vllm_share, rollout.vllm_sleeps) == (8, 0.9, False)
    assert job(f"{text}beta: 0.0\nsleep_level: 1\n").model.reference is False
    assert job(f"{text}sleep_level: 1\n").settings.rollout.vllm_sleeps is True


def test_samples_that_its_datasets_state() -> None:
    assert job(f"{LORA}dataset: [a/b#500, 'c/d:main#250']\n").data.samples == 750
    assert job(f"{LORA}dataset: [a/b#500, c/d]\n").data.samples is None


def test_its_quantization_is_double() -> None:
    quantization = job(f"{LORA}quant_method: bnb\nquant_bits: 4\n").model.quantization
    assert quantization is not None and (quantization.bits, quantization.double_quant) == (4, True)


def test_reward_models_are_its_rm() -> None:
    found = job(f"{LORA}rlhf_type: rm\n")
    assert (found.trainer, found.model.task, found.model.num_labels) == ("Reward", "sequence_classification", 1)


def test_another_tools_file_is_not_taken_for_it() -> None:
    found = job("model_name_or_path: gpt2\ntrain_type: lora\nper_device_train_batch_size: 4\nnum_train_epochs: 1\n")
    assert found.tool is None
