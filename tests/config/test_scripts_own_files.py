"""Files that a script of one's own reads: what their words mean, what of them is a guess, and what no figure shows is named."""

from __future__ import annotations

import pytest

from hfopt.config.read_job import Loaded, load_bytes
from hfopt.errors import ConfigError
from hfopt.facts.argument_effects import not_modelled
from hfopt.schema import TrainJob

LLAMA = "model:\n  name: meta-llama/Llama-3.2-1B\n"
TRAINING = "training:\n  per_device_train_batch_size: 4\n  learning_rate: 1.0e-4\n"


def loaded(text: str, *, has_bf16: bool = True) -> Loaded:
    return load_bytes(text.encode(), "c.yaml", has_bf16=has_bf16)


def job_of(text: str, *, has_bf16: bool = True) -> TrainJob:
    job = loaded(text, has_bf16=has_bf16).job
    assert job is not None
    return job


@pytest.mark.parametrize("key", ["mixed_precision", "use_amp", "amp"])
def test_mixed_precision_without_a_type_is_that_of_the_card_and_said(key: str) -> None:
    text = f"{LLAMA}{TRAINING}system:\n  {key}: true\n"
    assert job_of(text).settings.precision == "bf16"
    assert job_of(text, has_bf16=False).settings.precision == "fp16"
    assert job_of(text).model.notes == (f"{key}: true does not say in which type: bf16 is planned (bf16: true or fp16: true says it)",)


def test_mixed_precision_beside_its_type_is_that_type() -> None:
    stated = job_of(f"{LLAMA}{TRAINING}  fp16: true\nsystem:\n  mixed_precision: true\n")
    assert stated.settings.precision == "fp16"
    assert stated.model.notes == ()
    assert job_of(f"{LLAMA}{TRAINING}system:\n  mixed_precision: false\n").settings.precision == "fp32"


@pytest.mark.parametrize("word", ["val_ratio: 0.1", "validation_split_ratio: 0.05", "val_size: 200"])
def test_samples_held_back_beside_eval_steps_are_an_evaluation(word: str) -> None:
    steps = f"{LLAMA}{TRAINING}  eval_steps: 50\n"
    assert job_of(f"{steps}data:\n  {word}\n").raw["eval_strategy"] == "steps"
    assert "eval_strategy" not in job_of(f"{steps}data:\n  {word.split(':')[0]}: 0\n").raw


def test_a_class_of_the_scripts_own_has_the_head_that_its_name_says() -> None:
    own = job_of(f"model_name_or_path: roberta-base\narchitectures: RobertaForSequenceClassificationLstm\n{TRAINING}").model
    assert own.task == "sequence_classification"
    assert own.notes == (
        "architectures: RobertaForSequenceClassificationLstm is a class of the script's own: what it adds to the usual head is not in the "
        "figures",
    )
    usual = job_of(f"model_name_or_path: roberta-base\narchitectures: RobertaForSequenceClassification\n{TRAINING}").model
    assert (usual.task, usual.notes) == ("sequence_classification", ())


def test_a_trainer_that_only_a_section_names_is_a_guess() -> None:
    assert job_of(f"sft:\n  model_name: meta-llama/Llama-3.2-1B\n{TRAINING}").guessed_trainer
    assert not job_of(f"method: sft\n{LLAMA}{TRAINING}").guessed_trainer
    assert not job_of(f"{LLAMA}{TRAINING}").guessed_trainer
    assert not job_of("model_name_or_path: a/b\nnum_generations: 8\nper_device_train_batch_size: 8\nown: 1\n").guessed_trainer


@pytest.mark.parametrize("kind", ["ia3", "vera", "lokr"])
def test_an_adapter_of_another_kind_under_a_scripts_own_key(kind: str) -> None:
    model = job_of(f"method: {kind}\n{LLAMA}{TRAINING}").model
    assert model.stands_for == kind
    assert model.lora is not None


def test_prompts_and_whole_models_are_known_by_their_words() -> None:
    assert job_of(f"method: prefix-tuning\n{LLAMA}{TRAINING}").model.stands_for == "prefix tuning"
    assert job_of(f"method: full_ft\n{LLAMA}{TRAINING}lora:\n  r: 8\n").model.lora is None


@pytest.mark.parametrize(
    ("lines", "bits"),
    [
        ("quantize: true\nbnb_4bit_quant_type: fp4", 4),
        ("use_quantization: true", 4),
        ("quantize: true\nllm_int8_threshold: 6.0", 8),
        ("quantize: false\nbnb_4bit_quant_type: fp4", None),
        ("quantize: true\nload_in_8bit: true", 8),
    ],
)
def test_weights_that_a_switch_packs(lines: str, bits: int | None) -> None:
    found = job_of(f"{lines}\n{LLAMA}{TRAINING}lora:\n  r: 8\n").model.quantization
    assert (None if found is None else found.bits) == bits


def test_a_deepspeed_config_beside_the_arguments_counts() -> None:
    zero = "deepspeed:\n  zero_optimization:\n    stage: 2\n"
    assert job_of(f"{LLAMA}{TRAINING}{zero}").raw["deepspeed"] == {"zero_optimization": {"stage": 2}}


def test_a_model_that_stands_in_a_section_beside_is_named() -> None:
    beside = "reward_model:\n  model_name: org/rm\n"
    (said,) = loaded(f"{LLAMA}{TRAINING}{beside}").unread
    assert said == "reward_model: org/rm is set; what another model than the trained one holds on the card is not in the figures"


def test_files_that_a_file_builds_on_are_named() -> None:
    for line in ("extends: base.yaml", "defaults: base.yaml", "_base_: [base.yaml, ../lora.yml]"):
        (problem,) = [one for one in loaded(f"{line}\n{LLAMA}{TRAINING}").problems if one.code == "builds_on"]
        assert problem.message.startswith("the file builds on base.yaml")
    assert not [one for one in loaded(f"base: meta-llama/Llama-3.2-1B\n{TRAINING}").problems if one.code == "builds_on"]


def test_what_a_switch_that_is_off_reads_is_not_named() -> None:
    options = {"liger_kernel_config": {"rope": True}, "use_liger_kernel": False}
    assert list(not_modelled(options, "Trainer")) == []
    (said,) = not_modelled({**options, "use_liger_kernel": True}, "Trainer")
    assert said.startswith("liger_kernel_config")


def test_groups_of_completions_are_no_ppo() -> None:
    group = f"grpo:\n  group_size: 8\n  total_episodes: 1000\n{LLAMA}{TRAINING}"
    assert job_of(group).model.beyond is None
    assert job_of(f"ppo:\n  total_episodes: 1000\n{LLAMA}{TRAINING}").model.beyond is not None


def test_mixed_precision_of_a_script_stands_before_the_defaults_of_trl() -> None:
    dpo = f"{LLAMA}{TRAINING}  beta: 0.1\n  loss_type: sigmoid\n  max_prompt_length: 64\n"
    assert job_of(dpo).settings.precision == "bf16"
    assert job_of(f"{dpo}hardware:\n  mixed_precision: fp16\n").settings.precision == "fp16"


def test_only_samples_that_are_there_before_training_are_packed() -> None:
    assert job_of(f"packing: true\n{LLAMA}{TRAINING}").data.packing
    assert not job_of(f"packing: true\nnum_generations: 4\n{LLAMA}{TRAINING}").data.packing


def test_an_adapter_that_a_switch_turns_on() -> None:
    assert job_of(f"use_ia3: true\n{LLAMA}{TRAINING}").model.stands_for == "ia3"
    assert job_of(f"use_ia3: false\n{LLAMA}{TRAINING}").model.lora is None


def test_a_section_about_evaluation_is_no_profile() -> None:
    sections = "train_param: {batch_size: 16, lr: 1.0e-4, epochs: 2}\nvalid_param: {batch_size: 64}\ninfer_param: {batch_size: 128}\n"
    job = job_of(f"model_name: meta-llama/Llama-3.2-1B\n{sections}")
    assert (job.section, job.per_device_batch) == (("train_param",), 16)


@pytest.mark.parametrize(
    "lines", ["algorithm: reinforce", "method: rlvr", "loss: reinforce_loss", "max_prompt_length: 64\nmax_new_tokens: 64\ntemperature: 0.7"]
)
def test_a_method_that_generates_and_is_not_known_is_refused(lines: str) -> None:
    beyond = job_of(f"{lines}\n{LLAMA}{TRAINING}").model.beyond
    assert beyond is not None and "generates with the model that it trains" in beyond


@pytest.mark.parametrize(
    "lines",
    [
        "algorithm: reinforce\nnum_generations: 8",
        "max_new_tokens: 64\ntemperature: 0.7",
        "beta: 0.1\nmax_prompt_length: 64\nmax_new_tokens: 64\ntemperature: 0.7",
        "method: craft",
    ],
)
def test_methods_that_are_known_are_not(lines: str) -> None:
    assert job_of(f"{lines}\n{LLAMA}{TRAINING}").model.beyond is None


def test_a_length_of_prompts_alone_makes_dpo_a_guess() -> None:
    assert job_of(f"max_prompt_length: 64\n{LLAMA}{TRAINING}").guessed_trainer


def test_a_section_that_a_script_takes_apart_is_not_told_what_transformers_refuses() -> None:
    own = "model_name: x\ntraining_args:\n  epochs: 3\n  batch_size: 6\n  lr: 2.0e-5\n  show_progress_bar: true\n"
    assert not [one for one in loaded(own).problems if one.code == "unknown_key"]
    exact = "model_name: x\ntraining_args:\n  num_train_epochs: 3\n  per_device_train_batch_size: 6\n  show_bar: true\n"
    assert [one.key for one in loaded(exact).problems if one.code == "unknown_key"] == ["show_bar"]


def test_profiles_beside_what_they_share_are_asked_for() -> None:
    profile = "{learning_rate: 1.0e-5, per_device_train_batch_size: 4, gradient_accumulation_steps: 4}"
    shared = "training: {fp16: true, logging_steps: 10, eval_strategy: steps, eval_steps: 50, save_steps: 100, save_total_limit: 3}\n"
    read = loaded(f"model_name: x\nfirst: {profile}\nsecond: {profile}\n{shared}")
    assert read.job is None
    assert "several sections hold TrainingArguments: first, second" in {one.message for one in read.problems}
    assert job_of(f"model_name: x\nfirst: {profile}\n{shared}").per_device_batch == 4


def test_mixed_precision_that_is_off_stands_before_the_defaults_of_trl() -> None:
    grpo = f"{LLAMA}{TRAINING}  num_generations: 4\n"
    assert job_of(f"{grpo}hardware:\n  mixed_precision: false\n").settings.precision == "fp32"
    assert job_of(f"{grpo}hardware:\n  mixed_precision: 'no'\n").settings.precision == "fp32"


def test_swift_with_rewards_is_grpo() -> None:
    swift = "model: Qwen/Qwen2.5-0.5B\ntrain_type: lora\nper_device_train_batch_size: 8\n"
    assert job_of(f"{swift}reward_funcs: own\nnum_generations: 8\n").trainer == "GRPO"
    assert job_of(swift).trainer == "SFT"


def test_an_adapters_task_does_not_make_a_model_blind() -> None:
    lora = f"lora:\n  r: 8\n  task_type: CAUSAL_LM\n{TRAINING}"
    assert job_of(f"model_name: Qwen/Qwen2-VL-2B-Instruct\n{lora}").model.task == "image_text"
    assert job_of(f"model_name: Qwen/Qwen2-1.5B-Instruct\n{lora}").model.task == "causal_lm"


def test_a_collators_tokens_are_a_samples_length() -> None:
    assert job_of(f"collator_args:\n  max_tokens: 256\n{LLAMA}{TRAINING}").data.max_length == 256
    assert job_of(f"inference:\n  max_tokens: 256\n{LLAMA}{TRAINING}").data.max_length is None


def test_an_adapter_of_a_stage_before_trains_on() -> None:
    stage = "model_name: meta-llama/Llama-3.2-1B\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-4\n"
    assert job_of(f"{stage}dapt_lora_path: ./dapt\n").model.lora is not None
    assert job_of(f"{stage}final_lora_path: ./out\n").model.lora is None


def test_what_a_group_samples_is_its_completions_length() -> None:
    group = f"group_size: 16\nmax_tokens: 2048\n{LLAMA}{TRAINING}grpo: {{beta: 0.0}}\n"
    assert job_of(group).data.max_length == 512 + 2048
    assert job_of(f"num_generations: 4\nevaluation: {{max_new_tokens: 99}}\n{LLAMA}{TRAINING}").data.max_length is None


def test_weights_packed_in_a_form_that_is_not_modelled_are_named() -> None:
    (note,) = job_of(f"model_name: ISTA-DASLab/Meta-Llama-3-8B-Instruct-AQLM-2Bit-1x16\n{TRAINING}").model.notes
    assert note.startswith("the weights are AQLM's by the model's name")


def test_unsloth_of_a_file_named_for_a_method_is_that_method() -> None:
    text = "model: {name: unsloth/Qwen2-0.5B-Instruct-bnb-4bit, load_in_4bit: true}\nlora: {r: 8, use_gradient_checkpointing: unsloth}\n"
    assert (job := load_bytes(f"{text}{TRAINING}".encode(), "cpo_config.yaml").job) is not None
    assert (job.trainer, job.guessed_trainer) == ("CPO", True)


def test_the_prompt_is_what_the_length_of_both_leaves() -> None:
    both = job_of(f"num_generations: 4\nmax_length: 2048\nmax_new_tokens: 256\nkl_penalty: 0.1\n{LLAMA}{TRAINING}")
    assert both.data.max_length == 2048
    assert [(one.what, one.value, one.guessed) for one in both.data.assumed] == [
        ("prompt length", "1792 tokens", False),
        ("completion length", "256 tokens", False),
    ]
    assert both.model.reference


def test_a_group_is_grpo_where_its_clipping_stands_beside_it() -> None:
    text = f"group_size: 4\nclip_epsilon: 0.2\nmax_prompt_length: 64\n{LLAMA}{TRAINING}"
    assert job_of(text).trainer == "GRPO"
    packed = f"max_prompt_length: 64\nquantization: {{group_size: 128}}\n{LLAMA}{TRAINING}"
    assert job_of(packed).trainer == "DPO"
    by_name = load_bytes(f"max_prompt_length: 64\n{LLAMA}{TRAINING}".encode(), "grpo_config.yaml").job
    assert by_name is not None and (by_name.trainer, by_name.guessed_trainer) == ("GRPO", True)


def test_easyr1_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="a config of EasyR1"):
        loaded("algorithm:\n  adv_estimator: grpo\nworker:\n  actor: {global_batch_size: 128}\n")


def test_a_batch_of_a_step_beside_that_of_a_pass() -> None:
    job = job_of(f"{LLAMA}arguments:\n  train_micro_batch_size: 8\n  train_batch_size: 128\n  num_epochs: 2\n  lr: 1.0e-4\n")
    assert (job.per_device_batch, job.accumulation) == (8, 16)


@pytest.mark.parametrize("line", ["device: cpu", "device_map: cpu", "hardware: {device: CPU}"])
def test_a_script_that_computes_on_the_cpu(line: str) -> None:
    assert job_of(f"{LLAMA}{TRAINING}{line}\n").settings.use_cpu
    assert not job_of(f"{LLAMA}{TRAINING}device: cuda\nembedding: {{device: cpu}}\n").settings.use_cpu


def test_a_deepspeed_config_is_no_profile() -> None:
    reference = "reference_deepspeed:\n  train_micro_batch_size_per_gpu: 1\n  bf16: {enabled: true}\n  zero_optimization: {stage: 3}\n"
    arguments = "run: {learning_rate: 1.0e-4, per_device_train_batch_size: 2, gradient_accumulation_steps: 4}\n"
    assert job_of(f"{LLAMA}{arguments}{reference}").section == ("run",)


def test_a_reference_in_a_section_of_its_own_is_held() -> None:
    assert job_of(f"num_generations: 4\n{LLAMA}{TRAINING}ref:\n  model_path: a/b\n").model.reference
    assert not job_of(f"num_generations: 4\n{LLAMA}{TRAINING}").model.reference


def test_weights_packed_for_training_by_the_name_of_their_type() -> None:
    assert job_of(f"int4_training: true\n{LLAMA}{TRAINING}").model.quantization is not None
