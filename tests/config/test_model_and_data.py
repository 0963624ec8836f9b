"""Model, data, adapters and quantization are found under the names that TRL, LLaMA-Factory, alignment-handbook and plain scripts use."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.compat.versions import release
from hfopt.config.lookup import model_named_in, named_beside
from hfopt.config.read_job import load_bytes
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import installed, trl_default
from hfopt.schema import Lora, Quantization, TrainJob

ARGUMENTS = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nlearning_rate: 1.0e-4\n"


def job(text: str, path: str = "c.yaml") -> TrainJob:
    read = load_bytes((ARGUMENTS + text).encode(), path).job
    assert read is not None
    return read


@pytest.mark.parametrize(
    "text",
    [
        "model_name_or_path: org/name",
        "model:\n  name: org/name",
        "model:\n  pretrained_model_name_or_path: org/name\n  tokenizer: {name_or_path: org/other}",
        "model: org/name",
        "model_id: org/name",
        "ModelArguments:\n  model_name_or_path: org/name",
        "model_config:\n  load_from_pretrained_path: org/name",
        "tokenizer_name_or_path: org/other\nref_model: org/third\nbase_model: org/name",
        "base_id: org/name",
        "model_key: org/name",
        "model: org/name\nmodel_name: my-run-3",
        "model: bert\nmodel_name: org/name",
        "model_key: small\nmodels:\n  small: {hf_id: org/name}",
        "backbone: org/name",
        "restore_from: org/name",
        "model: {name: org/name}\nreward: {judge: {model_name: org/other}}",
        "dataset: {hf_repo: org/data}\nmodel: {hf_repo: org/name}",
    ],
)
def test_the_model_is_found(text: str) -> None:
    assert job(text).model.name == "org/name"


@pytest.mark.parametrize(
    "text",
    [
        *("max_seq_length: 512", "max_length: 512", "block_size: 512", "cutoff_len: 512", "model_max_length: 512"),
        *("data: {max_seq_len: '512'}", "tokenizer: {encoder_max_len: 512, decoder_max_len: 64}"),
    ],
)
def test_the_length_is_found(text: str) -> None:
    assert job(text + "\ngeneration: {max_length: 99}").data.max_length == 512


@pytest.mark.parametrize(
    ("text", "dataset"),
    [
        ("dataset_name: org/data", "org/data"),
        ("dataset: {name: org/data}", "org/data"),
        ("data:\n  path: org/data", "org/data"),
        ("dataset_mixer:\n  org/data: 1.0\n  org/more: 0.5", "org/data"),
        ("dataset_mixture:\n  datasets:\n  - id: org/data\n    seed: 1", "org/data"),
        ("dataset: identity,alpaca", "identity,alpaca"),
    ],
)
def test_the_dataset_is_found(text: str, dataset: str) -> None:
    assert job(text).data.dataset == dataset


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        (
            "use_peft: true\nlora_r: 16\nlora_alpha: 8\nlora_target_modules: [q_proj, v_proj]",
            Lora(r=16, alpha=8, dropout=0.05, target_modules=("q_proj", "v_proj")),
        ),
        (
            "use_peft: true\nlora_target_modules: all-linear\nuse_dora: true",
            Lora(r=16, alpha=32, dropout=0.05, target_modules="all-linear", use_dora=True),
        ),
        ("use_peft: false\nlora_r: 16", None),
        ("finetuning_type: lora\nlora_rank: 4\nlora_target: all", Lora(r=4, alpha=8, target_modules="all-linear")),
        ("finetuning_type: lora\nlora_target: q_proj,v_proj", Lora(r=8, alpha=16, target_modules=("q_proj", "v_proj"))),
        ("finetuning_type: full\nlora_rank: 4", None),
        ("peft:\n  r: 4\n  lora_alpha: 8\n  target_modules: [q]", Lora(r=4, alpha=8, target_modules=("q",))),
        ("lora: {enabled: false, r: 4}", None),
        ("use_peft: true\nlora_target_modules: [all-linear]", Lora(r=16, alpha=32, dropout=0.05, target_modules="all-linear")),
        ("training_type: full\nlora: {r: 4}", None),
        ("method: qlora", Lora(r=16, alpha=32, dropout=0.05, target_modules="all-linear")),
        ("adapter: {type: lora, rank: 4, target: all-linear}", Lora(r=4, alpha=8, target_modules="all-linear")),
        ("lora: true\nlora_rank: 4", Lora(r=4, alpha=32, dropout=0.05, target_modules="all-linear")),
        ("max_seq_length: 4", None),
    ],
)
def test_adapters_are_read_as_their_tool_reads_them(text: str, lora: Lora | None) -> None:
    assert job(text).model.lora == lora


@pytest.mark.parametrize(
    ("text", "quantization"),
    [
        ("load_in_4bit: true\nbnb_4bit_quant_type: fp4", Quantization(bits=4, quant_type="fp4")),
        ("load_in_8bit: true", Quantization(bits=8)),
        ("finetuning_type: lora\nquantization_bit: 4", Quantization(bits=4, double_quant=True)),
        ("quantization:\n  load_in_4bit: true\n  bnb_4bit_compute_dtype: bfloat16", Quantization(bits=4, compute_dtype="bfloat16")),
        ("load_in_4bit: false", None),
        ("method: qlora", Quantization(bits=4)),
        ("model: {quantization: {bits: 4, double_quant: true}}", Quantization(bits=4, double_quant=True)),
        ("model: {quantization_strategy: 4bit}", Quantization(bits=4)),
        ("quantization: {enabled: true, bits: 8}", Quantization(bits=8)),
        ("quantization: {enabled: false, bits: 4}", None),
        ("quantize: bnb.nf4", Quantization(bits=4)),
        ("quantization: int8", Quantization(bits=8)),
        ("bits: 16", None),
    ],
)
def test_quantization_is_read(text: str, quantization: Quantization | None) -> None:
    assert job(text).model.quantization == quantization


def test_a_script_that_packs_the_weights_must_add_an_adapter() -> None:
    assumed = job("load_in_4bit: true").model
    assert assumed.lora == Lora(r=16, alpha=32, target_modules="all-linear") and any("does not state" in note for note in assumed.notes)
    assert job("load_in_4bit: true\nuse_lora: false").model.lora is None
    assert job("packing: true\nload_in_4bit: true").model.lora is None, "TRL's own scripts add none unless they are told"


@pytest.mark.parametrize(
    ("text", "trainer", "task"),
    [
        ("num_generations: 8\nmax_prompt_length: 10", "GRPO", "causal_lm"),
        ("beta: 0.1\nmax_prompt_length: 10", "DPO", "causal_lm"),
        ("stage: rm\ntemplate: x\ncutoff_len: 8", "Reward", "causal_lm"),
        ("center_rewards_coefficient: 0.01", "Reward", "sequence_classification"),
        ("desirable_weight: 1.0", "KTO", "causal_lm"),
        ("packing: true", "SFT", "causal_lm"),
        ("predict_with_generate: true\ntask: summarization", "Seq2SeqTrainer", "seq2seq_lm"),
        ("task_name: mnli", "Trainer", "sequence_classification"),
        ("task: token-classification", "Trainer", "token_classification"),
        ("model_class: AutoModelForImageClassification", "Trainer", "image_classification"),
        ("seed: 1", "Trainer", None),
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: trl-lib/Capybara\nmax_length: 2048", "SFT", "causal_lm"),
        ("model_name_or_path: bert-base-uncased\ndataset_name: wikitext\nmax_length: 128", "Trainer", None),
        ("model_name: sentence-transformers/all-MiniLM-L6-v2\nnum_iterations: 20", "Trainer", None),
        ("model: org/model\ntrain:\n  grpo: {group_size: 4}", "GRPO", "causal_lm"),
        ("sft: {packing: true}\ngrpo: {group_size: 4}", "SFT", "causal_lm"),
        ("model_name: unsloth/gpt2\nuse_gradient_checkpointing: unsloth", "SFT", "causal_lm"),
        ("model_name_or_path: Qwen/Qwen2.5-0.5B\ndataset_name: imdb\nmax_length: 128\ntext_column: x", "Trainer", None),
        ("model_name_or_path: gpt2\ndataset_name: wikitext\nblock_size: 128", "Trainer", None),
        ("model_name_or_path: gpt2\ndataset_name: trl-lib/ultrafeedback\nbeta: 0.1", "DPO", "causal_lm"),
        ("dataset_name: trl-lib/ultrafeedback\nloss_type: ipo", "DPO", "causal_lm"),
        ("dataset_name: x\nbeta: 2.0\nloss_type: simpo", "CPO", "causal_lm"),
        ("trainer_type: rloo\nnum_generations: 4", "RLOO", "causal_lm"),
        ("loss_type: focal\nmax_length: 128", "Trainer", None),
        ("pretrained_model: openai/whisper-small\nuse_peft: false\npredict_with_generate: true", "Seq2SeqTrainer", None),
        ("model_name: bert-base-uncased\nuse_peft: true", "Trainer", None),
        (
            "model_name: x/y-7b\nsft: {enabled: true}\ndpo: {enabled: false, beta: 0.1}\ngrpo: {enabled: false, num_generations: 4}",
            "SFT",
            "causal_lm",
        ),
        ("model_name: x/y-7b\nref_model_name_or_path: x/y-7b\nmax_length: 64", "DPO", "causal_lm"),
        ("model_name: x/y-7b\ndpo_beta: 0.1", "DPO", "causal_lm"),
        ("model_name: x/y\nmodel_class: Llama4ForConditionalGeneration\npacking: true", "SFT", "causal_lm"),
        ("model_name: x/y-7b\nmax_length: 512\nmax_prompt_length: 256", "DPO", "causal_lm"),
        ("policy_model: x/y-7b\nalgorithm: grpo", "GRPO", "causal_lm"),
        ("model_name: x/y-7b\ntask: reward_modeling", "Reward", "sequence_classification"),
        ("model_name: x/bert\nloss: {name: MultipleNegativesRankingLoss}", "Trainer", "embedding"),
        ("model_name: x/y\nmodel_class: T5ForConditionalGeneration", "Trainer", "seq2seq_lm"),
        ("model_name: Qwen/Qwen2.5-VL-3B-Instruct\npacking: false", "SFT", "image_text"),
        ("model_name: Qwen/Qwen2.5-VL-3B-Instruct\nnum_generations: 8", "GRPO", "causal_lm"),
        ("model_name: google/gemma-3-4b-it\npacking: false\ndataset_name: x/llava-mix", "SFT", "image_text"),
        ("model_name: google/gemma-3-4b-it\npacking: false\ndataset_name: x/chats", "SFT", "causal_lm"),
        ("model_name: x/y\nmodel_class: WhisperForConditionalGeneration", "Trainer", "speech_seq2seq"),
        ("model_name: x/y\nmodel_class: Qwen2VLForConditionalGeneration", "Trainer", None),
    ],
)
def test_trainer_and_task(text: str, trainer: str, task: str | None) -> None:
    read = job(text)
    assert (read.trainer, read.model.task) == (trainer, task)


@pytest.mark.parametrize(("value", "side"), [("224", 224), ("[224, 448]", 448), ("[3, 384, 384]", 384), ("-5", -5)])
def test_an_image_is_planned_by_its_longer_side(value: str, side: int) -> None:
    assert job(f"model_name_or_path: org/name\nimage_size: {value}").data.image_size == side


def test_glue_knows_its_labels_and_the_file_knows_better() -> None:
    assert job("task_name: mnli").model.num_labels == 3
    assert job("task_name: mnli\nnum_labels: 2").model.num_labels == 2


def test_grpo_sequences_are_prompt_and_completion() -> None:
    assert job("num_generations: 8\nmax_prompt_length: 512\nmax_completion_length: 1024").data.max_length == 1536


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("torch_dtype: bfloat16", "bfloat16"),
        ("model: {name: x, dtype: torch.float16}", "float16"),
        ("torch_dtype: null", None),
        ("pure_bf16: true", "bfloat16"),
        ("finetuning_type: lora\nbf16: true", "bfloat16"),
        ("finetuning_type: full\nbf16: true", "float32"),
        ("finetuning_type: full\nbf16: true\nuse_badam: true", "bfloat16"),
        ("finetuning_type: full\nbf16: true\ndeepspeed: ds_z3_config.json", "bfloat16"),
        ("finetuning_type: full\nbf16: true\ndeepspeed: ds_z2_config.json", "float32"),
        ("finetuning_type: freeze\nbf16: true", "bfloat16"),
        ("packing: true\nmax_length: 10", "float32"),
        ("packing: true\ndtype: bfloat16", "bfloat16"),
        ("packing: true\ndtype: null", "auto" if release(installed().version) >= (5, 0) else "float32"),  # handed on to transformers
    ],
)
def test_what_the_weights_are_stored_in(text: str, dtype: str | None) -> None:
    assert job(text).model.weights_dtype == dtype


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        ("fp16: true", True),
        ("bf16: true", False),
        ("fp16: true\nuse_peft: true", False),
        ("fp16: true\ndeepspeed: ds_z2_config.json", False),
    ],
)
def test_where_a_grad_scaler_stands_between_weights_and_optimizer(text: str, scaled: bool) -> None:
    assert job(text).model.scales_loss is scaled


def test_llama_factory_checkpoints_unless_told_not_to() -> None:
    assert job("finetuning_type: full").raw["gradient_checkpointing"] is True
    assert job("finetuning_type: full\ndisable_gradient_checkpointing: true").raw["gradient_checkpointing"] is False


@pytest.mark.parametrize(
    ("text", "attention"),
    [
        ("attn_implementation: sdpa", "sdpa"),
        ("use_flash_attention_2: true", "flash_attention_2"),
        ("flash_attn: fa2", "flash_attention_2"),
        ("flash_attn: auto", None),
        ("model: {attention: flash_attention_2}", "flash_attention_2"),
        ("attention: multi-query", None),
    ],
)
def test_attention(text: str, attention: str | None) -> None:
    assert job(text).model.attn_implementation == attention


def test_keys_of_the_trainers_own_config_are_arguments_too() -> None:
    args = job("num_generations: '8'\nmax_prompt_length: 10\nbeta: 0.0\n").raw
    assert (args["num_generations"], args["max_prompt_length"], args["beta"]) == (8, 10, 0.0)


def test_what_an_installed_trl_sets_by_itself_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trl" / "trainer").mkdir(parents=True)
    (tmp_path / "trl" / "__init__.py").touch()
    (tmp_path / "trl" / "trainer" / "base_config.py").write_text(
        "class _BaseConfig:\n    gradient_checkpointing: bool = field(\n        default=True,\n    )\n"
        "    def __post_init__(self):\n        self.bf16 = not (self.fp16) if self.bf16 is None else self.bf16\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    args = job("packing: true").raw
    assert args["gradient_checkpointing"] is True and args["bf16"] is True
    args = job("packing: true\nfp16: true\ngradient_checkpointing: false").raw
    assert args["gradient_checkpointing"] is False and "bf16" not in args
    assert "gradient_checkpointing" not in job("seed: 1").raw


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("beta: 0.1\nmax_length: 10", None),
        ("beta: 0.1\nmax_length: 10\nprecompute_ref_log_probs: true", False),
        ("stage: dpo\nfinetuning_type: full\npref_loss: simpo", False),
        ("stage: dpo\nfinetuning_type: full\npref_loss: sigmoid", None),
        ("num_generations: 4\nmax_completion_length: 10", False),
        ("num_generations: 4\nbeta: 0.04", True),
        ("learning_rate: 1.0e-4", None),
    ],
)
def test_which_trainings_keep_a_reference(text: str, reference: bool | None) -> None:
    assert job(text).model.reference is reference


def test_a_bare_checkpoint_counts_before_its_family() -> None:
    assert job("model: bert\nmodel_name: bert-base-uncased").model.name == "bert-base-uncased"
    assert job("model_name: my-run\nmodel: gpt2").model.name == "gpt2"


@pytest.mark.parametrize("text", ["architectures: AutoModelForSequenceClassification", "architectures: [BertForSequenceClassification]"])
def test_architectures_in_the_file_name_the_task(text: str) -> None:
    assert job(f"model_name: bert-base-uncased\n{text}").model.task == "sequence_classification"


def test_labels_are_read_wherever_they_stand() -> None:
    assert job("model:\n  name: bert-base-uncased\n  num_labels: 5").model.num_labels == 5
    assert job("model_name: x/decoder-7b\ntask_type: TOKEN_CLS\nlabel_list: [O, B, I]").model.num_labels == 3


@pytest.mark.parametrize("section", ["testing", "eval", "generation", "inference", "validation", "sampling_params"])
def test_a_length_of_another_stage_is_not_the_training_length(section: str) -> None:
    assert job(f"{section}: {{max_length: 200}}").data.max_length is None
    assert job(f"max_tokens_count: 768\n{section}: {{max_length: 200}}").data.max_length == 768


def test_a_train_batch_is_the_batch() -> None:
    read = load_bytes(b"train_batch: 4\nlearning_rate: 1.0e-4\nnum_train_epochs: 3\n", "c.yaml").job
    assert read is not None and read.per_device_batch == 4


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("batch_size: 128\nmicro_batch_size: 4\ncutoff_len: 512\nbase_model: x/y", (4, 32)),
        ("sizes: {max_per_device_train_batch_size: 4, total_train_batch_size: 32}", (4, 8)),
        ("per_device_train_batch_size: 4\nglobal_batch_size: 30", (4, 1)),
        ("batch_size: 8\ngradient_accumulation_steps: 2", (8, 2)),
    ],
)
def test_the_batch_of_a_device_and_of_a_whole_step(text: str, batches: tuple[int, int]) -> None:
    read = load_bytes(f"{text}\nlearning_rate: 1.0e-4\nnum_train_epochs: 3\n".encode(), "c.yaml").job
    assert read is not None and (read.per_device_batch, read.accumulation) == batches and read.tool is None


def test_a_model_of_the_files_own_sizes() -> None:
    assert job("config_name: gpt2\nconfig_overrides: n_embd=64,n_layer=2").model.overrides == {"n_embd": 64, "n_layer": 2}
    made = job("model_config: {model_type: llama, hidden_size: 64, num_hidden_layers: 2, note: x}\nother: {vocab_size: 9}").model
    assert made.name is None and made.overrides == {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    assert job("model_type: llama").model.overrides == {}, "a family alone is no model"
    assert job("parts: [{model_type: clip, hidden_size: 64}]").model.overrides == {}, "nor is one of several parts"
    assert job("model_name: x/y\nmodel: {model_type: llama, hidden_size: 64}").model.overrides == {}


def test_sections_that_are_switched_off_do_not_count() -> None:
    text = "model: x/y-7b\nsft: {enabled: true, per_device_train_batch_size: 4, learning_rate: 0.1}\n"
    text += "dpo: {enabled: false, per_device_train_batch_size: 2, learning_rate: 0.1, max_length: 99}\n"
    read = load_bytes(text.encode(), "c.yaml").job
    assert read is not None and (read.section, read.per_device_batch, read.data.max_length) == (("sft",), 4, None)


def test_whose_parser_reads_the_file() -> None:
    flat = "model_name_or_path: x/y-7b\ndataset_name: x\npacking: true\n"
    assert not job(flat).own_script and not job(f"{flat}torch_dtype: null").own_script
    assert job(f"{flat}use_flash_attention_2: true").own_script
    assert job("orpo_alpha: 0.1\nbeta: 0.1\nmax_length: 5", "orpo.yaml").own_script, "trl has no such command"


def test_a_source_and_its_target() -> None:
    told = job("max_source_length: 256\nmax_target_length: 64").data
    assert (told.max_length, told.max_target_length, told.target_follows) == (256, 64, True)
    assert not job("max_length: 256\ngeneration_max_length: 64").data.target_follows


@pytest.mark.parametrize(
    ("text", "rank"), [("train_type: lora", 8), ("sft_type: lora\nlora_rank: 4", 4), ("train_type: full\nlora_rank: 8", None)]
)
def test_ms_swifts_way_to_say_lora(text: str, rank: int | None) -> None:
    lora = job(f"model: Qwen/Qwen2.5-0.5B\n{text}").model.lora
    assert (None if lora is None else lora.r) == rank
    assert lora is None or lora.target_modules == "all-linear"


def test_llama_factorys_datasets() -> None:
    factory = "model_name_or_path: x\nfinetuning_type: lora\ntemplate: qwen\nmax_samples: 1000\n"
    assert job(f"{factory}dataset: a,b").data.samples == 2000, "of each"
    assert job(factory).data.max_length == 2048, "its cutoff_len where none is stated"
    assert job(f"{factory}stage: pt").data.packing and not job(f"{factory}stage: sft").data.packing
    assert not job(f"{factory}stage: pt\npacking: false").data.packing


@pytest.mark.parametrize(
    ("path", "trainer"),
    [
        ("SimPO/training_configs/llama-3-8b-base-sft.yaml", "SFT"),
        ("org__SimPO__configs__llama-base-sft.yaml", "SFT"),
        ("recipes/zephyr/dpo/config_full.yaml", "DPO"),
        ("sft/dpo_from_sft.yaml", "DPO"),
    ],
)
def test_the_nearest_name_of_a_trainer_counts(path: str, trainer: str) -> None:
    short = load_bytes(b"model_name: x/y-7b\nmax_length: 64\nper_device_train_batch_size: 2\n", path).job
    assert short is not None and short.trainer == (trainer if trainer == "DPO" else "Trainer"), "a step that holds more than the samples"
    far = load_bytes(b"model_name: x/y-7b\nmax_length: 64\nper_device_train_batch_size: 2\n", "dpo-project/configs/small/train.yaml").job
    assert far is not None and far.trainer == "Trainer"
    read = load_bytes(b"model_name_or_path: x/y-7b\nuse_peft: true\nper_device_train_batch_size: 2\n", path).job
    assert read is not None and read.trainer == trainer


def test_grpo_says_which_length_it_assumes() -> None:
    read = job("model_name: Qwen/Qwen2.5-0.5B\nnum_generations: 8\nmax_completion_length: 300")
    assert read.data.max_length == 812 and [(part.value, part.guessed) for part in read.data.assumed] == [
        ("512 tokens", True),
        ("300 tokens", False),
    ]
    assert job("num_generations: 8\nmax_completion_length: 300\nmax_prompt_length: 100").data.assumed[0].guessed is False
    usual = trl_default("GRPO", "max_completion_length") or 256
    assert job("num_generations: 8\nmax_prompt_length: 100").data.max_length == 100 + usual, "the installed TRL's default"
    assert [part.guessed for part in job("num_generations: 8").data.assumed] == [True, True]
    assert job("num_generations: 8\nmax_length: 700").data.assumed == ()


def test_freeze_trains_the_last_layers() -> None:
    model = job("model_name_or_path: org/name\nstage: sft\ntemplate: qwen\nfinetuning_type: freeze").model
    assert model.last_layers == 2 and model.lora is None and model.widens_trained
    assert not job("stage: sft\ntemplate: qwen\nfinetuning_type: freeze\npure_bf16: true").model.widens_trained
    assert job("stage: sft\ntemplate: qwen\nfinetuning_type: freeze\nfreeze_trainable_layers: 3").model.last_layers == 3


@pytest.mark.parametrize(
    ("text", "rank", "words"),
    [
        ("stage: sft\ntemplate: qwen\nfinetuning_type: oft", 8, "OFT is planned as LoRA of rank 8"),
        ("peft:\n  peft_type: PROMPT_TUNING\n  num_virtual_tokens: 30", 1, "with its 30 tokens before each sample"),
        ("peft_type: IA3", 8, "ia3 is planned as LoRA"),
    ],
)
def test_adapters_of_other_kinds_are_planned_by_lora_and_said(text: str, rank: int, words: str) -> None:
    model = job(text).model
    assert model.lora is not None and model.lora.r == rank and any(words in note for note in model.notes) and model.stands_for


def test_a_flat_rank_beside_alpha_is_lora() -> None:
    model = job("model_name: unsloth/Qwen2.5-7B-bnb-4bit\nr: 16\nlora_alpha: 32\ntarget_modules: [q_proj]").model
    assert model.lora is not None and (model.lora.r, model.lora.target_modules) == (16, ("q_proj",))
    assert model.quantization is not None and model.quantization.bits == 4, "its name says so"
    assert job("model_name: gpt2\nr: 16").model.lora is None


@pytest.mark.parametrize(
    ("text", "key"),
    [("mixed_precision: bf16", "bf16"), ("precision: 16-mixed", "fp16"), ("mixed_precision: 'no'", None), ("precision: 4", None)],
)
def test_mixed_precision_in_a_scripts_own_words(text: str, key: str | None) -> None:
    raw = job(text).raw
    assert [name for name in ("fp16", "bf16") if raw.get(name)] == ([] if key is None else [key])
    assert "bf16" not in job(f"{text}\nfp16: false").raw


def test_virtual_tokens_stand_before_each_sample() -> None:
    assert job("max_length: 100\npeft:\n  peft_type: PROMPT_TUNING\n  num_virtual_tokens: 30").data.max_length == 130
    assert job("max_length: 100\npeft_type: IA3").data.max_length == 100


def test_an_optimizer_that_is_not_modelled_is_said() -> None:
    model = job("stage: sft\ntemplate: qwen\nfinetuning_type: full\nuse_galore: true").model
    assert model.lora is None and "GaLore's projected states are not modelled" in model.notes[0]


def test_the_model_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text("model:\n  name: org/name\n")
    (tmp_path / "empty.yaml").write_text("lr: 1\n")
    assert model_named_in(tmp_path / "model.yaml") == "org/name"
    with pytest.raises(ConfigError, match="names no model"):
        model_named_in(tmp_path / "empty.yaml")
    assert named_beside(tmp_path / "train.yaml") == (tmp_path / "model.yaml", "org/name")
    (tmp_path / "other.yaml").write_text("model_name: org/another\n")
    assert named_beside(tmp_path / "train.yaml") is None


def test_a_dataset_or_a_judge_alone_is_no_model() -> None:
    assert job("dataset: {hf_repo: org/data}").model.name is None
    assert job("reward: {model_name: org/judge}").model.name == "org/judge", "unless nothing else is named"


@pytest.mark.parametrize(("path", "trainer"), [("train_reward.yaml", "Reward"), ("reward_data/train.yaml", "Trainer")])
def test_a_reward_model_is_known_by_the_files_own_name(path: str, trainer: str) -> None:
    assert job("model: {base_model: org/llama-8b}\nrun_name: v1", path).trainer == trainer
    assert job("model: {base_model: bert-base-uncased}", "train_reward.yaml").trainer == "Trainer"


def test_a_dtype_that_a_script_of_its_own_decides_is_a_guess() -> None:
    nested = "model_name: org/llama-8b\ndpo: {beta: 0.1}\ntraining: {num_train_epochs: 1, per_device_train_batch_size: 2, style: a}\n"
    assert load_bytes(nested.encode(), "c.yaml").job.model.loads_itself  # type: ignore[union-attr]
    assert not load_bytes((nested + "dtype: bfloat16\n").encode(), "c.yaml").job.model.loads_itself  # type: ignore[union-attr]
    assert not job("model_name_or_path: org/llama-8b\ndataset_name: x\nmax_length: 8\nbeta: 0.1").model.loads_itself
    assert job("model_name_or_path: org/llama-8b\ntrain_file: x\nmax_answer_length: 8\nbeta: 0.1\nmax_length: 8").model.loads_itself


def test_simpo_of_the_paper_has_no_likelihood_in_its_loss() -> None:
    raw = job("model_name_or_path: org/llama-8b\nbeta: 2.0\ngamma_beta_ratio: 0.3").raw
    assert raw["loss_type"] == "simpo" and raw["cpo_alpha"] == 0
    assert job("model_name_or_path: org/llama-8b\nbeta: 2.0\ngamma_beta_ratio: 0.3\nsft_weight: 0.5").raw["cpo_alpha"] == 0.5


@pytest.mark.parametrize(
    "text", ["losses: [{name: focal, kind: focal}]", "experiment_family: safety_classifier_v2", "run_name: text-classification-3"]
)
def test_an_encoder_is_a_classifier_by_its_loss_or_its_runs_name(text: str) -> None:
    assert job(f"base_model: distilbert-base-uncased\n{text}").model.task == "sequence_classification"
    assert job(f"base_model: distilbert-base-uncased\ndataset: conll2003\n{text}").model.task == "token_classification"
    assert job(f"base_model: org/llama-8b\n{text}").model.task is None


def test_self_distillation_is_no_grpo() -> None:
    beyond = job("model: org/llama-8b\nmax_completion_length: 64\nsteps_per_generation: 4\ngenerate_from_teacher: false").model.beyond
    assert beyond is not None and beyond.startswith("self-distillation generates")


def test_a_script_that_uses_no_gpu_computes_on_the_cpu() -> None:
    assert job("model_name: org/llama-8b\nhardware: {use_gpu: false}").settings.use_cpu
    assert not job("model_name: org/llama-8b\nhardware: {use_gpu: true}").settings.use_cpu


def test_a_script_may_set_the_strategy_of_the_evaluations_it_counts() -> None:
    best = "model_name: org/llama-8b\nload_best_model_at_end: true\n"

    def told(text: str) -> str:
        return next(one.severity for one in load_bytes((ARGUMENTS + best + text).encode(), "c.yaml").problems if one.code == "conflict")

    assert told("eval_steps: 100") == "warning" and told("") == "error" and told("eval_steps: 100\neval_strategy: 'no'") == "error"


def test_a_completion_is_also_called_a_response() -> None:
    read = job("model: org/llama-8b\nnum_generations: 4\nmax_prompt_length: 100\nmax_response_length: 900")
    assert read.data.max_length == 1000 and read.raw["max_completion_length"] == 900
    assert [part.guessed for part in read.data.assumed] == [False, False]


def test_a_deepspeed_config_that_a_script_hands_on_is_read() -> None:
    engine = job(
        "model_name: org/llama-8b\ndeepspeed_config:\n  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}"
    ).settings.engine
    assert engine.deepspeed == {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert job("model_name: org/llama-8b\ndeepspeed_config: {zero_stage: 2}").settings.engine.deepspeed is None


@pytest.mark.parametrize("key", ["sft_adapter_path", "init_adapter_path", "resume_from_adapter", "peft_model_path"])
def test_an_adapter_to_go_on_with_trains_instead_of_the_whole_model(key: str) -> None:
    model = job(f"model_name: Qwen/Qwen2.5-0.5B\nbeta: 0.1\nmax_prompt_length: 64\n{key}: out/sft").model
    assert model.lora is not None and model.guessed_adapter
    assert any("out/sft is an adapter that trains on" in note for note in model.notes)


@pytest.mark.parametrize(
    "text", ["output: {adapter_dir: out/a}", "sft_adapter_path: out/a\nuse_peft: false", "sft_adapter_path: out/a\ntraining_type: full"]
)
def test_an_adapter_that_is_written_or_not_wanted_does_not_train(text: str) -> None:
    assert job(f"model_name: Qwen/Qwen2.5-0.5B\n{text}").model.lora is None


@pytest.mark.parametrize(
    ("text", "guessed"),
    [
        ("peft_config: {extends: DEFAULT, use_peft: true}", True),
        ("lora: {enabled: true, alpha: 16}", True),
        ("lora: {r: 8, target_modules: [q]}", False),
        ("lora_r: 8\ntarget_modules: [q]", False),
        ("r: 8\nlora_alpha: 16\ntarget_modules: all-linear", False),
        ("finetuning_type: lora\ntemplate: qwen", False),
        ("use_peft: true\ndataset_name: d\nmodel_name_or_path: gpt2", False),  # TRL's own parser: its default counts
    ],
)
def test_the_size_of_an_adapter_is_a_guess_where_a_script_keeps_it(text: str, guessed: bool) -> None:
    model = job(f"{text}\n" + ("" if "gpt2" in text else "model_name: gpt2\nmy_own_key: 3")).model
    assert (model.lora is not None, model.guessed_adapter) == (True, guessed)


@pytest.mark.parametrize(
    ("text", "samples", "at_most"),
    [
        ("max_samples: 100", 100, True),
        ("max_train_samples: 100", 100, True),
        ("num_train_samples: 100", 100, False),
        ("max_samples: 100000000000", None, True),
        ("max_samples: 100\nfinetuning_type: lora\ntemplate: x\ndataset: a, b", 200, True),
    ],
)
def test_a_limit_on_samples_is_no_number_of_them(text: str, samples: int | None, at_most: bool) -> None:
    data = job(f"model_name_or_path: gpt2\n{text}").data
    assert (data.samples, data.samples_at_most) == (samples, at_most)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("eval_steps: 20\neval_file: e.jsonl", True),
        ("eval_steps: 20\nload_best_model_at_end: true", True),
        ("eval_steps: 20", False),
        ("eval_steps: 20\nmetric_for_best_model: cer", True),
        ("eval_steps: 20\nper_device_eval_batch_size: 4", True),
        ("eval_steps: 20\nnum_eval_samples: 100", True),
        ("eval_steps: 20\nper_device_eval_batch_size: 4\ndo_train: true", False),  # run_clm.py and its kin read this
        ("eval_file: e.jsonl", False),
        ("eval_steps: 20\neval_file: e.jsonl\ndo_eval: false", False),
        ("eval_steps: 20\neval_file: e.jsonl\neval_strategy: 'no'", False),
    ],
)
def test_a_script_that_states_what_to_evaluate_on_evaluates(text: str, runs: bool) -> None:
    assert job(f"model_name: gpt2\nlora_r: 8\n{text}").settings.evaluation.runs is runs


def test_checkpointing_by_unsloth_is_checkpointing() -> None:
    read = load_bytes(f"{ARGUMENTS}model_name: unsloth/gpt2\ngradient_checkpointing: unsloth\nlora_r: 8\n".encode(), "c.yaml")
    assert read.job is not None and read.job.settings.checkpointing.every_n_layers == 1
    assert not [problem for problem in read.problems if problem.key == "gradient_checkpointing"]


@pytest.mark.parametrize(("stage", "refused"), [("cls", True), ("lvm", True), ("sft", False), ("pt", False), ("kto", False)])
def test_a_stage_that_only_a_fork_knows_is_not_planned_as_another(stage: str, refused: bool) -> None:
    model = job(f"model_name_or_path: gpt2\nfinetuning_type: full\ntemplate: x\nstage: {stage}").model
    assert (model.beyond is not None) is refused


def test_a_model_behind_an_api_is_not_offered_as_the_one_that_trains(tmp_path: Path) -> None:
    (tmp_path / "judge.yaml").write_text("judge_model: 1\nmodel_name: openai/gpt-5-mini\n")
    assert named_beside(tmp_path / "train.yaml") is None
    (tmp_path / "model.yaml").write_text("model_name: openai/gpt-oss-20b\n")
    assert named_beside(tmp_path / "train.yaml") == (tmp_path / "model.yaml", "openai/gpt-oss-20b")


def test_targets_that_a_script_keeps_are_taken_for_all_linear_layers() -> None:
    own = job("model_id: Qwen/Qwen2.5-0.5B\nlora_r: 16\nmy_own_key: 3").model
    assert own.lora is not None and (own.lora.target_modules, own.guessed_adapter) == ("all-linear", True)
    flat = job("model_name_or_path: gpt2\ndataset_name: d\nuse_peft: true\nlora_r: 16").model  # TRL's own parser: peft's usual ones
    assert flat.lora is not None and (flat.lora.target_modules, flat.guessed_adapter) == (None, False)


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("rloo: {num_generations: 4}", True),  # TRL's default is 0.05
        ("rloo: {num_generations: 4, beta: 0.0}", False),
        ("rloo: {num_generations: 4, kl_coef: 0.0}", False),
        ("grpo: {num_generations: 4}", False),
        ("grpo: {num_generations: 4, kl_coef: 0.04}", True),
    ],
)
def test_a_reference_is_kept_for_the_divergence_that_counts(text: str, reference: bool) -> None:
    if trl_default("RLOO", "beta") is None:
        pytest.skip("RLOO's default is read from TRL, which is not installed here")
    assert job(f"model_name: gpt2\n{text}").model.reference is reference


def test_types_of_packed_weights_under_short_names() -> None:
    packed = job("model_name: gpt2\nquantization: {load_in_4bit: true, quant_type: fp4, compute_dtype: float16}").model.quantization
    assert packed == Quantization(bits=4, quant_type="fp4", compute_dtype="float16")


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("model: {name: Qwen/Qwen3.6-35B-A3B}\ndata: {train_file: chat.jsonl}", "causal_lm"),
        ("model_name: google/gemma-3-4b-it", "causal_lm"),
        ("model_name: google/gemma-3-4b-it\nimage_column: image", None),  # what its checkpoint says
        ("model_name: Qwen/Qwen2.5-VL-3B-Instruct", None),
        ("model_name: google/gemma-3-4b-it\ntask: text-classification", "sequence_classification"),
    ],
)
def test_a_model_that_may_see_is_tuned_on_text_where_no_image_is_spoken_of(text: str, task: str | None) -> None:
    assert job(text).model.task == task


@pytest.mark.parametrize("key", ["target_parameters", "layers_to_transform", "rank_pattern", "trainable_token_indices"])
def test_what_peft_is_told_besides_is_not_passed_over(key: str) -> None:
    section = f"lora: {{r: 8, target_modules: [q_proj], bias: none, task_type: CAUSAL_LM, {key}: [a, b]}}"
    unread = load_bytes((ARGUMENTS + f"model_name: gpt2\n{section}\n").encode(), "c.yaml").unread
    assert unread == (f"not read, so in no figure: {key}",)


def test_zephyrs_first_names_of_an_adapter_and_a_dataset_in_a_mixer() -> None:
    adapter = "use_peft: true\npeft_lora_r: 8\npeft_lora_alpha: 12\npeft_lora_dropout: 0.3\npeft_lora_modules: [q_lin, v_lin]"
    model = job(f"model_name_or_path: distilbert-base-uncased\ndataset_mixer:\n  stanfordnlp/imdb: 1.0\n{adapter}").model
    assert model.lora == Lora(r=8, alpha=12.0, dropout=0.3, target_modules=("q_lin", "v_lin")) and not model.guessed_adapter
    assert (model.task, model.num_labels) == ("sequence_classification", 2)


@pytest.mark.parametrize(
    ("path", "trainer"),
    [
        ("rm_config.yaml", "Reward"),
        ("pairwise_orm.yaml", "Reward"),
        ("reward.yaml", "Reward"),
        ("norm.yaml", "Trainer"),
        ("rm/x.yaml", "Trainer"),
    ],
)
def test_a_file_that_is_named_after_a_reward_model(path: str, trainer: str) -> None:
    assert job("model: {base_model: facebook/opt-1.3b}\nmax_length: 64", path).trainer == trainer


def test_trls_own_parser_evaluates_only_when_it_is_told() -> None:
    flat = "model_name_or_path: gpt2\ndataset_name: d\npacking: true\neval_steps: 20\nper_device_eval_batch_size: 4\n"
    assert not job(flat).settings.evaluation.runs
    assert job(flat + "my_own_key: 3").settings.evaluation.runs
    assert job(flat + "eval_strategy: steps").settings.evaluation.runs
