"""The model and the data a config names, under the many keys that people use for them.

What is trained: the model, its task, adapters and quantization, under the names that TRL, LLaMA-Factory and plain scripts use. What it is
trained on: the dataset and the size of one sample, under the many names configs have for them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from hfopt.compat.versions import release
from hfopt.config.deepspeed_json import named_stage
from hfopt.config.lookup import Facts, model_name, overrides_of
from hfopt.config.other_keys import beyond_one_model, stage_notes
from hfopt.config.other_tools import (
    LLAMA_FACTORY,
    PLAIN,
    TRL,
    dialect_of,
    is_llama_factory,
    is_swift,
    is_unsloth,
    swift_samples,
    trl_dtype,
)
from hfopt.config.trained_parts import (
    continued_adapter,
    first_number,
    frozen_parts,
    image_facts,
    lora_of,
    method_word,
    states_rank,
    strings,
    tuning_method,
    unsaid_notes,
)
from hfopt.config.trainer_kind import own_class_notes, read_task
from hfopt.facts.training_keys import installed, trl_default
from hfopt.schema import GENERATING, Assumption, DataSpec, EvaluationSpec, Lora, ModelSpec, Quantization, TrainerKind

Trainer = TrainerKind

_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "auto": "auto",
}


_ASSUMED_LORA = Lora(r=16, alpha=32.0, target_modules="all-linear")
_NO_ADAPTER = (
    "packed weights cannot train, so the script must add an adapter, which the file does not state: LoRA r=16 on all linear layers"
)
"""The Trainer refuses a quantized model without one (transformers' trainer.py)."""


def read_model(facts: Facts, trainer: Trainer, args: dict[str, Any]) -> ModelSpec:
    factory = is_llama_factory(facts)
    method = tuning_method(facts, factory=factory)
    lora, quantization = method.lora or lora_of(facts, factory), _quantization(facts, factory)
    notes = (
        *method.notes,
        *(stage_notes(facts) if factory else ()),
        *own_class_notes(facts),
        *unsaid_notes(facts, args, own_reader=dialect_of(facts, trainer).own_reader),
    )
    if lora is None and quantization is not None and dialect_of(facts, trainer) is PLAIN and not facts.false("use_peft", "use_lora"):
        lora, notes = _ASSUMED_LORA, (*notes, _NO_ADAPTER)
    elif lora is None and not factory and (adapter := continued_adapter(facts)) is not None:
        lora, notes = (
            _ASSUMED_LORA,
            (*notes, f"{adapter} is an adapter that trains on; its size is not in the file: LoRA r=16 on all linear layers"),
        )
    task, labels = read_task(facts, trainer, is_factory=factory)
    name = model_name(facts)
    return ModelSpec(
        name=name,
        overrides=overrides_of(facts, named=name is not None or is_swift(facts)),
        task=task,
        weights_dtype=_weights_dtype(facts, trainer, args, partly=lora is not None or method.last_layers is not None),
        scales_loss=args.get("fp16") is True and lora is None and not facts.has("deepspeed"),  # DeepSpeed scales in a way of its own
        stands_for=method.stands_for,
        widens_trained=method.last_layers is not None and not facts.true("pure_bf16"),
        attn_implementation=_attention(facts),
        lora=lora,
        guessed_adapter=lora is not None and not states_rank(facts) and method.stands_for is None,
        quantization=quantization,
        frozen=strings(facts.get("frozen_modules", "freeze_modules", "frozen_prefixes")),
        frozen_parts=frozen_parts(facts, is_factory=factory or is_swift(facts)),
        num_labels=labels,
        reference=_reference(facts, trainer, args),
        trust_remote_code=facts.true("trust_remote_code"),
        last_layers=method.last_layers,
        notes=notes,
        beyond=beyond_one_model(facts),
    )


def with_guesses(model: ModelSpec) -> ModelSpec:
    """A script's file without an adapter's targets: the script has them, and of what it may have all linear layers take the most."""
    lora = model.lora
    if lora is None or lora.target_modules is not None or model.stands_for is not None:
        return model
    return replace(model, lora=replace(lora, target_modules="all-linear"), guessed_adapter=True)


def _reference(facts: Facts, trainer: Trainer, args: dict[str, Any]) -> bool | None:
    """TRL asks the reference before training with precompute_ref_log_probs, and keeps none; GRPO keeps one for its KL term alone.

    Losses without a reference: LLaMA-Factory's pref_loss (hparams/finetuning_args.py, use_ref_model), TRL's former reference_free.
    """
    if trainer in ("DPO", "KTO"):
        alone = facts.text("pref_loss") in ("orpo", "simpo") or facts.true("reference_free", "precompute_ref_log_probs")
        return False if alone else None
    beta = first_number(facts.number(*_BETAS), args.get("beta"), trl_default(trainer, "beta"), 0)
    beside = facts.text(*_BESIDE, under=("ref", "reference", "ref_model", "reference_model")) is not None  # a section of its own
    return beta > 0 or beside if trainer in ("GRPO", "RLOO") else None


_BESIDE = ("model_path", "model_name_or_path", "name_or_path", "model_name", "name", "path")
_BETAS = (
    "beta",
    "kl_coef",
    "kl_coeff",
    "kl_beta",
    "init_kl_coef",
    "grpo_beta",
    "kl_penalty_coef",
    "kl_penalty",
    "kl_weight",
    "kl_loss_coef",
)
_DTYPE_KEYS = ("torch_dtype", "dtype", "model_dtype", "weights_dtype")


def _weights_dtype(facts: Facts, trainer: Trainer, args: dict[str, Any], *, partly: bool) -> str | None:
    """What the tool loads the weights in, where the file does not say.

    LLaMA-Factory (model/adapter.py) loads in the compute type and makes what trains float32 again, unless pure_bf16, BAdam or ZeRO-3
    keep it. TRL (trainer/utils.py, create_model_from_path; trainer/model_config.py) loads float32, but hands a null on to transformers,
    which takes the checkpoint's type for it since version 5.
    """
    if facts.true("pure_bf16"):
        return "bfloat16"
    said = facts.text(*_DTYPE_KEYS)
    if said is not None:
        return _DTYPES.get(said.lower().removeprefix("torch."))
    dialect = dialect_of(facts, trainer)
    if dialect.name == TRL.name:
        unstated = "auto" if facts.has(*_DTYPE_KEYS) and release(installed().version) >= (5, 0) else trl_dtype()
        return "bfloat16" if is_unsloth(facts) else unstated
    if dialect is not LLAMA_FACTORY:
        return None
    if not partly and not facts.true("use_badam") and not _zero_3(facts):
        return "float32"
    return "bfloat16" if args.get("bf16") is True else "float16" if args.get("fp16") is True else None


def states_dtype(facts: Facts) -> bool:
    return facts.has(*_DTYPE_KEYS) or is_unsloth(facts)


def _zero_3(facts: Facts) -> bool:
    """By the name of DeepSpeed's config, or by its stage where it stands in the file."""
    return named_stage(facts.text("deepspeed")) == 3 or any(stage == 3 for _, stage in facts.all("stage", under=("zero_optimization",)))


def _attention(facts: Facts) -> str | None:
    said, loose = facts.text("attn_implementation", "attention_implementation", "attn_impl"), facts.text("attention", "attention_type")
    if said is None and loose in ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"):
        return loose
    if said is not None:
        return {"flash_attn": "flash_attention_2", "fa2": "flash_attention_2"}.get(said, said)  # flash_attn: ms-swift's name for it
    if facts.true("use_flash_attention_2", "use_flash_attention", "flash_attention_2", "use_flash_attn"):
        return "flash_attention_2"
    return {"fa2": "flash_attention_2", "sdpa": "sdpa", "disabled": "eager", "fa3": "flash_attention_3"}.get(facts.text("flash_attn") or "")


def _quantization(facts: Facts, factory: bool) -> Quantization | None:
    bits = _quantized_bits(facts)
    if bits is None:
        return None
    double = facts.true(*_DOUBLE)
    return Quantization(
        bits=bits,
        quant_type=facts.text("bnb_4bit_quant_type", "quantization_type")
        or facts.text("quant_type", under=_QUANTIZATION_SECTIONS)
        or "nf4",
        double_quant=double or (bits == 4 and ((factory and not facts.false("double_quantization")) or _swift_doubles(facts))),
        compute_dtype=_DTYPES.get((_compute_type(facts) or "").lower().removeprefix("torch.")),
    )


def _compute_type(facts: Facts) -> str | None:
    return facts.text("bnb_4bit_compute_dtype") or facts.text("compute_dtype", under=_QUANTIZATION_SECTIONS)


_DOUBLE = ("use_bnb_nested_quant", "bnb_4bit_use_double_quant", "double_quantization", "use_nested_quant", "double_quant", "nested_quant")
_QUANTIZATION_SECTIONS = ("quantization", "quantization_config", "bnb", "bnb_config", "quant", "bitsandbytes", "qlora")


def _quantized_bits(facts: Facts) -> Literal[4, 8] | None:
    if any(value is False for _, value in facts.all("enabled", under=_QUANTIZATION_SECTIONS)):
        return None
    written, name = facts.whole("quantization_bit", "quant_bits", "quantization_bits", "bits", "kbit"), (model_name(facts) or "").lower()
    said = (facts.text("quantization", "quantization_strategy", "quantize", "quantization_mode", "load_in") or "").lower()
    if (
        facts.true("load_in_4bit", "use_qlora", "use_4bit", "qlora", "int4_training")
        or written == 4
        or "bnb-4bit" in name
        or method_word(facts) == "qlora"
    ):
        return 4
    if facts.true("load_in_8bit", "use_8bit", "int8_training") or written == 8 or "bnb-8bit" in name:
        return 8
    found = re.search(r"(?:^|\D)([48])[-_ ]?bits?|int([48])|(nf4|fp4)", said)
    if found is None and facts.true("quantize", "quantized", "quantization", "use_quantization", "enable_quantization", "use_bnb"):
        return 8 if facts.has("bnb_8bit_compute_dtype", "llm_int8_threshold") and not facts.has(*_OF_4BIT) else 4
    return None if found is None else 8 if "8" in (found[1], found[2]) else 4


_OF_4BIT = ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")


def _swift_doubles(facts: Facts) -> bool:
    """ms-swift's bnb_4bit_use_double_quant is true unless the file says otherwise (swift/arguments/base_args/quant_args.py)."""
    return is_swift(facts) and not facts.false("bnb_4bit_use_double_quant")


_DATA_SECTIONS = ("data", "dataset", "data_args", "dataset_args", "dataarguments", "data_arguments", "datasets", "train_dataset")
_NOT_TRAINING = (
    *("generation", "generate", "generation_config", "generation_kwargs", "generate_kwargs", "gen_kwargs", "sampling", "sampling_params"),
    *("inference", "infer", "inference_config", "predict", "prediction", "export", "serve", "serving", "deploy", "vllm", "test_vllm"),
    *("eval", "evaluation", "evaluate", "eval_config", "eval_args", "eval_dataset", "validation", "val", "valid", "val_dataset"),
    *("test", "testing", "test_config", "test_dataset", "benchmark", "metrics", "teacher", "reward_model"),
)
_BESIDE_TRAINING = frozenset(_NOT_TRAINING) - {"generation", "generate", "generation_config", "generation_kwargs", "sampling", "vllm"}
_LENGTHS = (
    *("max_seq_length", "cutoff_len", "max_seq_len", "max_sequence_length", "block_size", "max_source_length", "max_input_length"),
    *("max_length", "model_max_length", "sequence_length", "seq_length", "seq_len", "context_length", "max_len", "context_len"),
    *("max_tokens_count", "max_token_count", "max_tokens_per_sample", "max_token_length", "max_tokens_length", "max_text_length"),
    *("tokenizer_max_length", "train_max_length", "max_context_length", "max_input_len", "sequence_len", "max_num_tokens", "max_seqlen"),
    *("encoder_max_length", "encoder_max_len", "max_encoder_length", "source_max_length", "source_max_len", "max_source_len"),
    *("max_length_tokens", "max_sample_length", "max_context_tokens", "max_tokens_len"),
)
_TARGET_LENGTHS = (
    *("max_target_length", "max_output_length", "max_label_length", "decoder_max_length", "decoder_max_len", "max_decoder_length"),
    *("target_max_length", "target_max_len", "max_target_len", "max_output_len", "max_summary_length"),
)


_AUDIO_SECONDS = (
    *("max_duration_in_seconds", "max_audio_seconds", "max_audio_length_s", "audio_seconds", "max_duration_s", "max_duration"),
    *("max_length_seconds", "max_seconds", "max_duration_seconds", "max_audio_length_seconds", "max_audio_len"),
    *("max_audio_duration", "max_length_in_sec", "max_input_length_in_sec", "max_length_in_seconds", "max_audio_len_s", "max_audio_length"),
)
_PROMPTS = ("max_prompt_length", "max_prompt_len")
COMPLETIONS = ("max_completion_length", "max_response_length", "response_length")
_SAMPLED = (*COMPLETIONS, "max_new_tokens", "max_tokens", "max_generation_length", "max_gen_length")  # of a method that generates
GRPO_PROMPT, GRPO_COMPLETION = 512, 256  # TRL's defaults while it had both; the second is the installed one's where TRL is here
FACTORY_LENGTH = 2048  # llamafactory 0.9.5, hparams/data_args.py: cutoff_len


def read_data(facts: Facts, trainer: Trainer) -> DataSpec:
    target = facts.whole(*_TARGET_LENGTHS, not_under=_NOT_TRAINING)
    length = _length(facts, trainer)
    return DataSpec(
        dataset=_dataset(facts),
        max_length=None if length is None else length + tuning_method(facts, factory=is_llama_factory(facts)).virtual_tokens,
        max_target_length=target or facts.whole("generation_max_length"),
        target_follows=target is not None and facts.whole("max_source_length", "max_input_length") is not None,
        packing=_packing(facts, trainer),
        **image_facts(facts),
        audio_seconds=facts.number(*_AUDIO_SECONDS),
        samples=_samples(facts),
        samples_at_most=facts.whole(*_COUNTS) is None and facts.whole(*_LIMITS) is not None,
        assumed=_generated_parts(facts, trainer) if trainer in ("GRPO", "RLOO") else (),
    )


def _packing(facts: Facts, trainer: Trainer) -> bool:
    """LLaMA-Factory packs for pre-training (`stage: pt`) unless it is told not to (hparams/data_args.py)."""
    if trainer in GENERATING or (trainer not in ("SFT", "Trainer") and dialect_of(facts, trainer).name == TRL.name):
        return False  # TRL packs nothing there, whatever a script's file says
    pretraining = is_llama_factory(facts) and facts.text("stage") == "pt" and not facts.false("packing")
    packed = facts.true("packing", "neat_packing", "sample_packing") or (trainer == "SFT" and facts.true("padding_free"))
    return packed or pretraining


_COUNTS, _LIMITS = ("num_train_samples", "train_samples"), ("max_train_samples", "max_samples")
_NO_LIMIT = 100_000_000  # samples: a limit above it says that all are meant


def _samples(facts: Facts) -> int | None:
    """LLaMA-Factory's max_samples holds for each of its datasets."""
    stated = facts.whole(*_COUNTS, *_LIMITS)
    if stated is None and is_swift(facts):
        return swift_samples(facts)
    many = len(strings(facts.get("dataset"))) if is_llama_factory(facts) else 1
    return None if stated is None or stated > _NO_LIMIT else stated * max(1, many)


def read_evaluation_spec(facts: Facts) -> EvaluationSpec:
    """A name for a metric means that a script computes it; without one nothing is known."""
    named = facts.has("compute_metrics", "eval_metric", "eval_metrics", "metric_name", "metrics", "metric")
    return EvaluationSpec(
        samples=facts.whole("max_eval_samples", "num_eval_samples", "eval_samples", "max_val_samples", "max_validation_samples"),
        computes_metrics=True if named else None,
    )


def _length(facts: Facts, trainer: Trainer) -> int | None:
    """GRPO's and RLOO's sequences are prompt and completion together."""
    if trainer in ("GRPO", "RLOO"):
        prompt, completion = _prompt(facts), facts.whole(*_SAMPLED, not_under=_BESIDE_TRAINING)
        if prompt is not None or completion is not None:
            return (prompt or GRPO_PROMPT) + (completion or _completion(trainer))
    stated = facts.whole(*_LENGTHS, not_under=_NOT_TRAINING) or facts.whole("max_tokens", under=_TOKENIZING)
    return FACTORY_LENGTH if stated is None and is_llama_factory(facts) else stated


_TOKENIZING = ("collator_args", "collator", "data_collator", "tokenizer_args", "tokenizer", "tokenization", "preprocessing")


def _prompt(facts: Facts) -> int | None:
    """As stated, or what the length of both leaves for it."""
    both, sampled = facts.whole(*_LENGTHS, not_under=_NOT_TRAINING) or 0, facts.whole(*_SAMPLED, not_under=_BESIDE_TRAINING)
    return facts.whole(*_PROMPTS) or (both - sampled if sampled is not None and both > sampled else None)


def _completion(trainer: Trainer) -> int:
    found = trl_default(trainer, "max_completion_length")
    return found if isinstance(found, int) else GRPO_COMPLETION


def _generated_parts(facts: Facts, trainer: Trainer) -> tuple[Assumption, ...]:
    """The two lengths whose sum is GRPO's, each guessed where it is not stated."""
    parts = {"prompt": (_PROMPTS, GRPO_PROMPT), "completion": (_SAMPLED, _completion(trainer))}
    stated = {"prompt": _prompt(facts), "completion": facts.whole(*_SAMPLED, not_under=_BESIDE_TRAINING)}
    if not any(stated.values()) and facts.whole(*_LENGTHS, not_under=_NOT_TRAINING) is not None:
        return ()
    return tuple(
        Assumption(what=f"{name} length", value=f"{stated[name] or usual} tokens", guessed=stated[name] is None, settle=keys[0])
        for name, (keys, usual) in parts.items()
    )


_DATASETS = (
    *("dataset_name", "dataset_id", "dataset_id_or_path", "dataset_name_or_path", "dataset_path", "dataset_repo", "dataset", "train_file"),
)


def _dataset(facts: Facts) -> str | None:
    mixer = facts.get("dataset_mixer")
    if isinstance(mixer, dict) and mixer:
        return str(next(iter(mixer)))
    name = facts.text("id", under=("dataset_mixture",)) or facts.text(*_DATASETS, not_under=_NOT_TRAINING)
    if name is None:
        name = facts.text("name", "path", "id", "repo", "train", "train_path", under=_DATA_SECTIONS, not_under=_NOT_TRAINING)
    return None if name is None or "${" in name else name
