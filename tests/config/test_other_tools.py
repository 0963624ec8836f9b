"""Files that another tool's parser reads: what it dropped is told, and what is its own stays."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfopt.config.read_job import load_bytes
from hfopt.config.yaml_edit import upgrade
from hfopt.errors import ConfigError

BATCH = "per_device_train_batch_size"
SFT = f"model_name_or_path: x\ndataset_name: d\npacking: true\noutput_dir: o\nuse_cpu: true\nbf16: false\n{BATCH}: 2\n"
DPO = f"model_name_or_path: x\ndataset_name: d\nbeta: 0.1\nmax_length: 512\noutput_dir: o\nuse_cpu: true\nbf16: false\n{BATCH}: 2\n"
FACTORY = f"model_name_or_path: x\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\ncutoff_len: 512\noutput_dir: o\n{BATCH}: 1\n"

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL's keys are read from TRL")


def findings(text: str) -> dict[str | None, Any]:
    return {problem.key: problem for problem in load_bytes(text.encode(), "c.yaml").problems}


def repaired(text: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(upgrade(load_bytes(text.encode(), "c.yaml")).data)
    return data


@needs_trl
@pytest.mark.parametrize(
    ("text", "key", "fix", "after"),
    [
        (SFT + "max_seq_length: 1024\n", "max_seq_length", "max_length: 1024", {"max_length": 1024}),
        (SFT + "max_seq_length: 1024\nmax_length: 512\n", "max_seq_length", "max_length is set already", {"max_length": 512}),
        (SFT + "torch_dtype: bfloat16\n", "torch_dtype", "dtype: bfloat16", {"dtype": "bfloat16"}),
        (SFT + "dataset_batch_size: 10\n", "dataset_batch_size", "drop the line", {}),
        (DPO + "max_prompt_length: 256\n", "max_prompt_length", "drop the line", {}),
    ],
)
def test_keys_gone_from_trl_are_told_with_the_new_name(text: str, key: str, fix: str, after: dict[str, Any]) -> None:
    found = findings(text)[key]
    assert found.severity == "error" and "gone from TRL" in found.message and fix in found.fix
    now = repaired(text)
    assert key not in now and after.items() <= now.items()


@needs_trl
@pytest.mark.parametrize("key", ["use_liger", "use_liger_kernel"])
def test_a_renamed_key_of_trl_is_in_force_before_its_repair(key: str) -> None:
    job = load_bytes(f"{SFT}{key}: true\n".encode(), "c.yaml").job
    assert job is not None and job.settings.liger


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("Megatron-SWIFT", "model: org/name\ntuner_type: lora\nmicro_batch_size: 2\nglobal_batch_size: 16\nlr: 1.0e-4\n"),
        ("nanotron", "parallelism: {dp: 8}\ntokens: {micro_batch_size: 4}\noptimizer: {learning_rate: 0.1, weight_decay: 0.1}\n"),
        ("verl", "actor_rollout_ref: {actor: {ppo_micro_batch_size_per_gpu: 4}}\ntrainer: {save_freq: 1, logger: x}\n"),
        ("NeMo RL", "policy: {train_micro_batch_size: 4}\ncluster: {gpus_per_node: 8}\ngrpo: {max_num_epochs: 1}\n"),
        ("trlx", "train: {batch_size: 4, epochs: 1}\nmethod: {name: PPOConfig}\noptimizer: {name: adamw}\n"),
    ],
)
def test_engines_of_their_own_are_refused_by_name(tool: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"a config of {tool}"):
        load_bytes(text.encode(), "c.yaml")


@pytest.mark.parametrize("lines", ["num_iterations: 20\n", "body_learning_rate: 2.0e-5\n"])
def test_setfit_is_refused_by_name(lines: str) -> None:
    text = f"model_id: sentence-transformers/paraphrase-mpnet-base-v2\nbatch_size: 16\nnum_epochs: 1\n{lines}"
    with pytest.raises(ConfigError, match="a config of SetFit"):
        load_bytes(text.encode(), "c.yaml")


def test_the_example_scripts_hand_beams_and_lengths_on_to_the_evaluation() -> None:
    text = f"model_name_or_path: t5-small\nnum_beams: 4\nval_max_target_length: 64\n{BATCH}: 4\noutput_dir: o\n"
    plain, generating = (load_bytes(f"{text}{more}".encode(), "c.yaml").job for more in ("", "predict_with_generate: true\n"))
    assert plain is not None and plain.settings.evaluation.generation_beams == 1
    assert generating is not None and generating.settings.evaluation.generation_beams == 4
    assert generating.settings.evaluation.generation_max_length == 64


def test_unsloth_checkpoints_and_loads_bfloat16() -> None:
    text = f"model_name: unsloth/gpt2\nmax_seq_length: 64\nuse_gradient_checkpointing: unsloth\n{BATCH}: 2\noutput_dir: o\n"
    loaded = load_bytes(text.encode(), "c.yaml")
    assert loaded.job is not None and loaded.job.settings.checkpointing.on and loaded.job.model.weights_dtype == "bfloat16"
    assert any("unsloth's own kernels" in note for note in loaded.job.model.notes)


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("finetuning_type: full\nquantization_bit: 4\n", "quantization_bit"),
        ("finetuning_type: lora\nuse_galore: true\n", "finetuning_type"),
        ("finetuning_type: full\nuse_dora: true\n", "use_dora"),
        ("finetuning_type: lora\nstage: dpo\npredict_with_generate: true\nval_size: 0.1\n", "predict_with_generate"),
        ("finetuning_type: lora\neval_strategy: steps\n", "val_size"),
        ("finetuning_type: lora\nstreaming: true\n", "max_steps"),
        ("finetuning_type: full\npure_bf16: true\ndeepspeed: zero3\n", "pure_bf16"),
        ("finetuning_type: lora\nstage: ppo\n", "reward_model"),
    ],
)
def test_what_llama_factorys_parser_refuses(lines: str, key: str) -> None:
    text = f"model_name_or_path: x\ntemplate: qwen\n{BATCH}: 1\n{lines}"
    found = {problem.key: problem for problem in load_bytes(text.encode(), "c.yaml").problems if problem.code == "refused_by_tool"}
    assert list(found) == [key] and "LLaMA-Factory refuses to start" in found[key].message


def test_what_llama_factorys_parser_takes() -> None:
    for lines in ("eval_strategy: steps\nval_size: 0.1\n", "quantization_bit: 4\n", "streaming: true\nmax_steps: 100\n"):
        assert not [one for one in findings(FACTORY + lines).values() if one.code == "refused_by_tool"]


def test_llama_factory_v1_is_refused_by_name() -> None:
    text = "model: Qwen/Qwen3-0.6B\nmodel_class: llm\nkernel_config: {name: auto}\ndist_config: {name: fsdp2}\nmicro_batch_size: 1\n"
    with pytest.raises(ConfigError, match="a config of LLaMA-Factory v1"):
        load_bytes(text.encode(), "c.yaml")


@needs_trl
def test_a_key_that_trl_still_has_is_not_told() -> None:
    assert findings(SFT + "dataset_text_field: text\nmax_length: 512\n") == {}


@pytest.mark.slow
@needs_trl
@pytest.mark.parametrize(
    ("kind", "text"), [("SFTConfig", SFT + "max_seq_length: 64\ndataset_text_field: text\n"), ("DPOConfig", DPO + "max_prompt_length: 9\n")]
)
def test_trls_own_parser_takes_the_repaired_file(tmp_path: Path, kind: str, text: str) -> None:
    import trl

    old = "warmup_ratio: 0.1\noverwrite_output_dir: true\nevaluation_strategy: 'no'\ntorch_dtype: float32\nlogging_dir: l\n"
    path = tmp_path / "c.yaml"
    parser = trl.TrlParser((trl.ScriptArguments, getattr(trl, kind), trl.ModelConfig))
    path.write_text(text + old)
    with pytest.raises(ValueError, match="Unknown arguments"):
        parser.parse_args_and_config(["--config", str(path)])
    path.write_bytes(upgrade(load_bytes(path.read_bytes(), "c.yaml")).data)
    _, training, model = trl.TrlParser((trl.ScriptArguments, getattr(trl, kind), trl.ModelConfig)).parse_args_and_config(
        ["--config", str(path)]
    )
    assert training.max_length == (64 if kind == "SFTConfig" else 512) and training.warmup_steps == 0.1 and model.dtype == "float32"


def test_llama_factory_keeps_what_its_parser_reads() -> None:
    text = FACTORY + "overwrite_output_dir: true\nwarmup_ratio: 0.1\nlearning_rate: 1e-5\n"
    assert {"overwrite_output_dir", "warmup_ratio"}.isdisjoint(findings(text))
    assert repaired(text) == yaml.safe_load(text)
    job = load_bytes(text.encode(), "c.yaml").job
    assert job is not None and job.raw["warmup_steps"] == 0.1, "read all the same"


def test_a_section_that_a_script_takes_apart_keeps_its_keys() -> None:
    text = "training:\n  batch_size: 8\n  lr: 1.0e-4\n  warmup_ratio: 0.1\n  output_dir: o\n"
    found = findings(text)["warmup_ratio"]
    assert found.severity == "warning" and "script" in found.message
    assert repaired(text) == yaml.safe_load(text)
    passed_on = text.replace("batch_size", BATCH).replace("lr:", "learning_rate:")
    assert repaired(passed_on)["training"]["warmup_steps"] == 0.1


def test_kto_with_one_sample_is_trls_affair_alone() -> None:
    factory = FACTORY.replace("stage: sft", "stage: kto")
    assert BATCH not in findings(factory)
    assert "KL term" in findings(f"desirable_weight: 1.0\noutput_dir: o\nlearning_rate: 1.0e-5\n{BATCH}: 1\n")[BATCH].message


def test_a_script_with_an_optimizer_of_type_and_params_is_not_called_deepspeeds() -> None:
    optimizer = "optimizer:\n  type: adamw\n  params: {lr: 1.0e-4}\n"
    with pytest.raises(ConfigError, match="a config of DeepSpeed"):
        load_bytes(f"{optimizer}scheduler: {{type: WarmupLR}}\n".encode(), "c.yaml")
    own = f"{optimizer}model: {{init_name: large-v3}}\ndataset: {{batch_size: 4}}\ntraining: {{epochs: 1, label_smoothing: 0.1}}\n"
    loaded = load_bytes(own.encode(), "c.yaml")
    assert loaded.job is not None and loaded.job.model.name is None
