"""Axolotl's YAML: read as what it trains, checked by its own rules, and written back in its own keys."""

from __future__ import annotations

from typing import Any

import pytest

from hfopt.config.read_job import load_bytes
from hfopt.config.yaml_edit import edit
from hfopt.errors import ConfigError
from hfopt.schema import Change, Lora, TrainJob

HEAD = "base_model: org/model\ndatasets:\n  - path: org/data\n    type: alpaca\nlearning_rate: 2e-4\n"
QLORA = HEAD + (
    "adapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\nlora_target_linear: true\nsequence_len: 2048\nsample_packing: true\n"
    "micro_batch_size: 2\ngradient_accumulation_steps: 4\noptimizer: paged_adamw_8bit\nbf16: auto\ngradient_checkpointing: true\n"
    "flash_attention: true\nval_set_size: 0.05\nevals_per_epoch: 4\n"
)


def job_of(text: str, **options: Any) -> TrainJob:
    job = load_bytes(text.encode(), "c.yaml", **options).job
    assert job is not None
    return job


def findings(text: str) -> dict[str | None, str]:
    return {problem.key: problem.message for problem in load_bytes(text.encode(), "c.yaml").problems}


def test_a_qlora_file_is_read_as_what_it_trains() -> None:
    job = job_of(QLORA)
    assert (job.tool, job.trainer, job.per_device_batch, job.accumulation, job.uses_trl) == ("axolotl", "SFT", 2, 4, False)
    assert job.model.name == "org/model" and job.model.weights_dtype == "bfloat16" and job.model.attn_implementation == "flash_attention_2"
    assert job.model.lora == Lora(r=16, alpha=32.0, dropout=0.0, target_modules="all-linear")
    packed = job.model.quantization
    assert packed is not None and (packed.bits, packed.double_quant, packed.quant_type) == (4, True, "nf4")
    assert job.data.max_length == 2048 and job.data.packing and job.data.dataset == "org/data"
    expected = {
        "bf16": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "paged_adamw_8bit",
        "eval_strategy": "steps",
        "per_device_eval_batch_size": 2,
        "learning_rate": 0.0002,
    }
    assert expected.items() <= job.raw.items()


def test_what_the_file_leaves_out_is_axolotls_default() -> None:
    job = job_of(HEAD)
    assert (job.per_device_batch, job.accumulation, job.data.max_length, job.data.packing) == (1, 1, 512, False)
    assert job.raw["optim"] == "adamw_torch_fused" and job.raw["bf16"] is True and job.raw["gradient_checkpointing"] is False
    assert job.raw["eval_strategy"] == "no" and job.model.lora is None and job.model.quantization is None


def test_the_total_batch_gives_the_accumulation() -> None:
    assert job_of(HEAD + "micro_batch_size: 4\nbatch_size: 64\n").accumulation == 16


@pytest.mark.parametrize(
    ("lines", "has_bf16", "precision", "weights"),
    [
        ("", True, "bf16", "bfloat16"),
        ("", False, "fp16", "float16"),
        ("bf16: auto\nfp16: true\n", True, "fp16", "float16"),
        ("bf16: true\n", False, "bf16", "bfloat16"),
        ("bf16: full\n", True, None, "bfloat16"),
        ("bf16: false\nfp16: false\n", True, None, "float32"),
        ("bf16: false\nfloat16: true\n", True, None, "float16"),
    ],
)
def test_the_precision_is_settled_as_axolotl_settles_it(lines: str, has_bf16: bool, precision: str | None, weights: str) -> None:
    job = job_of(HEAD + lines, has_bf16=has_bf16)
    assert {key for key in ("bf16", "fp16") if job.raw.get(key) is True} == ({precision} if precision else set())
    assert job.model.weights_dtype == weights


@pytest.mark.parametrize(
    ("lines", "kept_wide"),
    [
        ("", True),
        ("attn_implementation: sdpa\n", True),
        ("flash_attention: true\n", False),
        ("fsdp_version: 2\nfsdp_config: {transformer_layer_cls_to_wrap: X}\n", False),
        ("adapter: lora\nlora_r: 8\nlora_target_linear: true\n", False),
        ("bf16: false\n", False),
    ],
)
def test_whole_models_keep_embeddings_and_norms_in_float32_where_axolotl_does(lines: str, kept_wide: bool) -> None:
    model = job_of(HEAD + lines).model
    assert ("norm" in model.float32_modules) is kept_wide
    assert any("float32" in note for note in model.notes) is kept_wide


@pytest.mark.parametrize(
    ("key", "whole"),
    [
        ("", True),
        ("cut_cross_entropy: true\n", False),
        ("chunked_cross_entropy: true\n", False),
        ("liger_fused_linear_cross_entropy: true\n", False),
    ],
)
def test_whole_logits_are_said(key: str, whole: bool) -> None:
    notes = job_of(QLORA + key).model.notes
    assert any("holds the logits whole" in note for note in notes) is whole


@pytest.mark.parametrize(
    ("lines", "trainer", "uses_trl"),
    [
        ("rl: dpo\n", "DPO", True),
        ("rl: kto\n", "KTO", True),
        ("rl: orpo\n", "ORPO", True),
        ("rl: simpo\n", "CPO", True),
        ("rl: grpo\ntrl: {num_generations: 4, max_completion_length: 128, beta: 0.01}\n", "GRPO", True),
        ("reward_model: true\n", "Reward", True),
        ("cut_cross_entropy: true\n", "SFT", True),
        ("plugins:\n  - axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin\n", "SFT", True),
        ("plugins:\n  - axolotl.integrations.liger.LigerPlugin\nliger_fused_linear_cross_entropy: true\n", "SFT", False),
    ],
)
def test_the_trainer_is_the_one_axolotl_starts(lines: str, trainer: str, uses_trl: bool) -> None:
    job = job_of(HEAD + lines)
    assert (job.trainer, job.uses_trl) == (trainer, uses_trl)
    if trainer == "GRPO":
        assert job.raw["num_generations"] == 4 and job.raw["beta"] == 0.01


def test_fsdp_and_deepspeed_are_engines() -> None:
    sharded = job_of(HEAD + "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_offload_params: true}\n")
    assert sharded.raw["fsdp"] == ["full_shard", "auto_wrap"] and sharded.raw["fsdp_config"] == {"offload_params": True}
    assert job_of(HEAD + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n").raw["fsdp"]
    assert job_of(HEAD + "deepspeed: deepspeed_configs/zero2.json\n").raw["deepspeed"] == "deepspeed_configs/zero2.json"
    assert "deepspeed" not in job_of(HEAD + "deepspeed:\nfsdp:\nfsdp_config:\n").raw


def test_changes_are_written_in_its_own_keys_and_nothing_else_moves() -> None:
    text = QLORA.replace("micro_batch_size: 2", "micro_batch_size:   2   # per card")
    loaded = load_bytes(text.encode(), "c.yaml")
    wanted = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "per_device_eval_batch_size": 16,
        "dataloader_num_workers": 4,
        "optim": "adamw_bnb_8bit",
    }
    edited = edit(loaded, [Change(key=key, before=None, after=after, reason="") for key, after in wanted.items()]).data.decode()
    expected = (
        text.replace("micro_batch_size:   2   #", "micro_batch_size:   8   #")
        .replace("gradient_accumulation_steps: 4\n", "gradient_accumulation_steps: 1\neval_batch_size: 16\ndataloader_num_workers: 4\n")
        .replace("gradient_checkpointing: true", "gradient_checkpointing: false")
        .replace("paged_adamw_8bit", "adamw_bnb_8bit")
    )
    assert sorted(edited.splitlines()) == sorted(expected.splitlines())
    kept = [line for line in edited.splitlines(keepends=True) if line in text.splitlines(keepends=True)]
    assert "".join(kept) in "".join(line for line in text.splitlines(keepends=True) if line in kept)


def test_what_axolotl_has_no_key_for_is_not_planned() -> None:
    job = job_of(QLORA)
    assert {"dataloader_persistent_workers", "use_liger_kernel", "attn_implementation"} <= job.fixed and not job.kept
    assert "attn_implementation" not in job_of(HEAD + "attn_implementation: sdpa\n").fixed


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("micro_batch_size: two\n", "micro_batch_size", "micro_batch_size is the text 'two'"),
        ("micro_batch_size: -1\n", "micro_batch_size", "at least 1"),
        ("gradient_accumulation_steps: 2\nbatch_size: 8\n", "batch_size", "takes one of them"),
        ("load_in_4bit: true\n", "load_in_4bit", "without an adapter"),
        ("adapter: qlora\n", "adapter", "load_in_4bit"),
        ("attn_implementation: sdpa\nflash_attention: true\n", "flash_attention", "takes one of them"),
        ("micro_batchsize: 4\n", "micro_batchsize", "not a key that axolotl"),
    ],
)
def test_what_axolotl_refuses_is_found(lines: str, key: str, words: str) -> None:
    assert words in findings(HEAD + lines)[key]


def test_a_clean_file_has_no_findings() -> None:
    assert findings(QLORA) == {}


def test_kernels_of_its_own_are_planned_as_pytorchs() -> None:
    model = job_of(HEAD + "xformers_attention: true\n").model
    assert model.attn_implementation == "sdpa" and any("xformers" in note for note in model.notes)


def test_a_number_written_as_text_is_no_fault() -> None:
    job = job_of(HEAD + "micro_batch_size: '4'\n")
    assert job.per_device_batch == 4 and job.raw["learning_rate"] == 0.0002


def test_a_pattern_of_modules_stays_a_pattern() -> None:
    lines = "adapter: lora\nlora_r: 8\nlora_target_modules: 'model.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'\n"
    lora = job_of(HEAD + lines).model.lora
    assert lora is not None and lora.target_modules == r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"


def test_an_unreadable_batch_stops_before_a_job() -> None:
    assert load_bytes((HEAD + "micro_batch_size: two\n").encode(), "c.yaml").job is None


def test_two_marks_or_typed_datasets_make_it_axolotls() -> None:
    assert job_of("base_model: m\nmicro_batch_size: 1\nsequence_len: 64\n").tool == "axolotl"
    with pytest.raises(ConfigError, match="no TrainingArguments"):
        load_bytes(b"base_model: m\ntitle: words\n", "c.yaml")


def test_what_is_frozen_of_an_adapter_is_not_the_whole_model() -> None:
    key = "unfrozen_parameters: ['^lm_head']\n"
    assert any("all of them are planned to train" in note for note in job_of(QLORA + key).model.notes)
    assert any(
        "every weight is planned to train" in note for note in job_of(HEAD + "micro_batch_size: 1\nsequence_len: 8\n" + key).model.notes
    )


def test_keys_of_axolotls_own_that_may_change_a_step_are_named() -> None:
    base = "base_model: gpt2\nsequence_len: 64\nmicro_batch_size: 2\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: 1.0e-4\n"

    def told(text: str) -> list[str]:
        job = load_bytes((base + text).encode(), "c.yaml").job
        assert job is not None
        return [note for note in job.model.notes if note.startswith("not read")]

    assert told("expert_offload: true\nliger_rms_norm: true") == ["not read, so in no figure: expert_offload, liger_rms_norm"]
    assert told("liger_fused_linear_cross_entropy: true\nliger_rms_norm: true\nliger_layer_norm: true") == []
    assert told("expert_offload: false\nliger_rms_norm: false\nlora_r: null") == []
    assert told("pad_to_sequence_len: true\neval_sample_packing: false\nattn_implementation: sdpa\nsave_embedding_layers: true") == []
    assert told("adapter: lora\nlora_r: 8\nlora_target_linear: true\nlora_modules_to_save: [lm_head]\npeft_use_rslora: true") == []
