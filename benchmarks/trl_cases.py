"""Jobs of TRL's trainers (and of Seq2SeqTrainer) with small models: one YAML each, and the trainer that a script would make of it.

The models are folders with a config, random weights and a tokenizer of one token per word, written once into a cache folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_WIDTH = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
_SIDES = {
    f"{side}_{part}": size
    for side in ("encoder", "decoder")
    for part, size in {"layers": 3, "attention_heads": 8, "ffn_dim": 1024, "layerdrop": 0.0}.items()
}
_T5 = {"num_layers": 3, "num_decoder_layers": 3, "d_kv": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {**_WIDTH, "vocab_size": 50_000, "tie_word_embeddings": True},
    "llama": {**_WIDTH, "vocab_size": 32_000, "head_dim": 64},
    "gemma2": {**_WIDTH, "vocab_size": 64_000, "head_dim": 64, "sliding_window": 128},
    "gpt2": {"n_embd": 512, "n_layer": 4, "n_head": 8, "vocab_size": 50_257},
    "qwen3": {**_WIDTH, "vocab_size": 70_000, "head_dim": 64},
    "phi3": {
        **_WIDTH,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32_064,
    },
    "t5": {**_T5, "d_model": 512, "d_ff": 1024, "num_heads": 8, "vocab_size": 32_128},
    "mt5": {**_T5, "d_model": 256, "d_ff": 512, "num_heads": 4, "vocab_size": 60_000},
    "bart": {**_SIDES, "d_model": 512, "vocab_size": 50_265, "max_position_embeddings": 512},
    "pegasus": {**_SIDES, "d_model": 256, "vocab_size": 40_000, "max_position_embeddings": 512},
    "marian": {**_SIDES, "d_model": 256, "vocab_size": 30_000, "decoder_vocab_size": 30_000, "max_position_embeddings": 512},
}
DECODERS, SEQ2SEQ = ("qwen2", "llama", "gemma2", "gpt2", "qwen3"), ("t5", "mt5", "bart", "pegasus", "marian")
_WORDS = ("<pad>", "<eos>", "<unk>", "a")
_PROMPT = 8  # tokens, of preference samples


@dataclass(frozen=True, kw_only=True)
class TrlCase:
    """`keys` are those of the YAML beside the model's, the data's and the batch's."""

    kind: str
    model: str
    name: str
    length: int = 256
    batch: int = 6
    steps: int = 3
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name} {self.model}"

    def arguments(self, folder: Path) -> dict[str, Any]:
        """The YAML."""
        said: dict[str, Any] = {
            "model_name_or_path": str(folder),
            "dataset_name": "some/data",
            "per_device_train_batch_size": self.batch,
            "max_steps": self.steps,
            "logging_steps": 1,
            **self.keys,
        }
        if self.kind == "Seq2SeqTrainer":
            return {**said, "predict_with_generate": True, "max_source_length": self.length, "max_target_length": self.length // 2}
        if self.kind in ("GRPO", "RLOO"):
            completion = self.length // 4
            return {**said, "num_generations": 2, "max_completion_length": completion, "max_prompt_length": self.length - completion}
        unenforced = self.keys.get("padding_free") and not self.keys.get("packing")
        return {
            **said,
            "trainer_type": self.kind.lower(),
            **({"max_seq_length": self.length} if unenforced else {"max_length": self.length}),
        }


def cases() -> list[TrlCase]:
    lora = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
    shapes: list[tuple[str, str, dict[str, Any]]] = [
        ("SFT", "SFT", {}),
        ("SFT", "SFT bf16 weights", {"dtype": "bfloat16", "gradient_accumulation_steps": 2}),
        ("SFT", "SFT no checkpointing", {"gradient_checkpointing": False}),
        ("SFT", "SFT LoRA", lora),
        ("SFT", "SFT packed", {"packing": True}),
        ("SFT", "SFT padding-free", {"padding_free": True}),
        ("DPO", "DPO", {"beta": 0.1, "gradient_accumulation_steps": 2}),
        ("DPO", "DPO LoRA", {"beta": 0.1, **lora}),
        ("DPO", "DPO precomputed", {"beta": 0.1, "precompute_ref_log_probs": True}),
        ("KTO", "KTO", {"desirable_weight": 1.0}),
        ("Reward", "Reward", {"center_rewards_coefficient": 0.01}),
        ("GRPO", "GRPO", {}),
        ("GRPO", "GRPO beta", {"beta": 0.04}),
        ("RLOO", "RLOO", {"trainer_type": "rloo"}),
    ]
    decoders = [TrlCase(kind=kind, model=model, name=name, keys=keys) for kind, name, keys in shapes for model in DECODERS]
    decoders.append(TrlCase(kind="SFT", model="phi3", name="SFT no checkpointing", keys={"gradient_checkpointing": False}))
    return [*decoders, *(TrlCase(kind="Seq2SeqTrainer", model=model, name="Seq2Seq", keys={"bf16": True}) for model in SEQ2SEQ)]


def model_folder(case: TrlCase, cache: Path) -> Path:
    """The checkpoint, written if it is not there yet."""
    import transformers

    folder = cache / f"{case.model}{'-reward' if case.kind == 'Reward' else ''}"
    if not (folder / "config.json").exists():
        config = transformers.CONFIG_MAPPING[case.model](
            **MODELS[case.model], pad_token_id=0, eos_token_id=1, bos_token_id=1, decoder_start_token_id=0
        )
        if case.kind == "Reward":
            config.num_labels = 1
        auto = {"Reward": "AutoModelForSequenceClassification", "Seq2SeqTrainer": "AutoModelForSeq2SeqLM"}.get(
            case.kind, "AutoModelForCausalLM"
        )
        getattr(transformers, auto).from_config(config).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_trainer(case: TrlCase, folder: Path, **settings: Any) -> Any:
    """As `trl <kind> --config` would: the model by its path, the config's arguments, a dataset of text."""
    import dataclasses

    if case.kind == "Seq2SeqTrainer":
        return _seq2seq_trainer(case, folder, settings)
    import trl
    from datasets import Dataset

    config = getattr(trl, f"{case.kind}Config")
    said = case.arguments(folder)
    script = dict(said, **({"max_length": None} if "max_seq_length" in said else {}))
    fields = {item.name for item in dataclasses.fields(config) if item.init}
    chosen = {key: value for key, value in script.items() if key in fields}
    chosen["model_init_kwargs"] = {"dtype": script.get("dtype", "float32")}
    args = config(output_dir=tempfile.mkdtemp(), report_to=[], save_strategy="no", disable_tqdm=True, **(chosen | settings))
    more: dict[str, Any] = {"reward_funcs": [_reward]} if case.kind in ("GRPO", "RLOO") else {}
    if script.get("use_peft"):
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(
            r=script["lora_r"], lora_alpha=32, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    kind: Any = getattr(trl, f"{case.kind}Trainer")
    patches: dict[str, Any] = {"_send_telemetry": lambda self: None}
    if settings.get("use_cpu"):  # a minute of real forwards, whose answers change nothing
        patches["_precompute_ref_logps"] = _asked_before
    kind = type(kind.__name__, (kind,), patches)
    return kind(model=str(folder), args=args, train_dataset=Dataset.from_list(_rows(case)), **more)


def _asked_before(self: Any, dataset: Any, *_: Any, **__: Any) -> Any:
    return dataset.add_column("ref_chosen_logps", [0.0] * len(dataset)).add_column("ref_rejected_logps", [0.0] * len(dataset))


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def _rows(case: TrlCase) -> list[dict[str, Any]]:
    """Most are as long as they may be, every sixth a quarter shorter."""
    count = case.batch * max(8, 4 * case.keys.get("gradient_accumulation_steps", 1))
    return [_row(case, case.length - (case.length // 4 if number % case.batch == 1 else 0), number) for number in range(count)]


def _row(case: TrlCase, length: int, number: int) -> dict[str, Any]:
    def text(tokens: int) -> str:
        return " ".join(["a"] * tokens)

    if case.kind == "SFT":
        return {"text": text((case.length if case.keys.get("packing") or case.keys.get("padding_free") else length) - 1)}
    if case.kind in ("GRPO", "RLOO"):
        return {"prompt": text(case.length - case.length // 4)}
    prompt, answer = f"{text(_PROMPT)} ", text(length - _PROMPT - 1)
    if case.kind == "KTO":
        return {"prompt": prompt, "completion": answer, "label": number % 2 == 0}
    return {"prompt": prompt, "chosen": answer, "rejected": answer}


def _seq2seq_trainer(case: TrlCase, folder: Path, settings: dict[str, Any]) -> Any:
    import transformers
    from datasets import Dataset

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=case.batch,
        max_steps=case.steps,
        logging_steps=1,
        **({**case.keys} | settings),
    )
    rows = []
    for number in range(8 * case.batch):
        share = 3 if number % case.batch == 1 else 4
        source, target = case.length * share // 4, case.length // 2 * share // 4
        rows.append({"input_ids": [3] * source, "attention_mask": [1] * source, "labels": [3] * target})
    collator = transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    return transformers.Seq2SeqTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), data_collator=collator)
