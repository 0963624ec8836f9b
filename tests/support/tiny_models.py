"""Model folders and data files made on the spot: small enough to train in a second, complete enough for `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 60
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokenizer() -> Any:
    words = {f"w{i}": i for i in range(WORDS)} | {word: WORDS + i for i, word in enumerate(("[PAD]", "[UNK]", "[MASK]", "</s>"))}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **special)


def models_in(folder: Path) -> None:
    """bert, bert_mlm, encoder, llama, t5 and vit, each a folder."""
    torch.manual_seed(0)
    text = {"vocab_size": WORDS + 4, "pad_token_id": WORDS, "max_position_embeddings": 64}
    made = {
        "bert": transformers.BertForSequenceClassification(transformers.BertConfig(**text, **SMALL, num_labels=3)),
        "bert_mlm": transformers.BertForMaskedLM(transformers.BertConfig(**text, **SMALL)),
        "encoder": transformers.BertModel(transformers.BertConfig(**text, **SMALL)),
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**text, **SMALL, eos_token_id=WORDS + 3)),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=WORDS + 4,
                d_model=16,
                d_kv=8,
                d_ff=32,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=WORDS,
                pad_token_id=WORDS,
                eos_token_id=WORDS + 3,
            )
        ),
        "vit": transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, num_labels=2, **SMALL)),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        if name != "vit":
            tokenizer().save_pretrained(folder / name)


def data_in(folder: Path) -> None:
    """pairs.json (sentence1, sentence2, label), preferences.json (prompt, chosen, rejected), texts.json and lines.txt."""

    def text(seed: int, words: int) -> str:
        return " ".join(f"w{(seed * 7 + place * 3) % WORDS}" for place in range(words))

    rows = range(64)
    pairs = [{"sentence1": text(i, 3 + i % 9), "sentence2": text(i + 5, 2 + i % 4), "label": i % 3} for i in rows]
    preferences = [{"prompt": text(i, 3), "chosen": text(i + 1, 2 + i % 5), "rejected": text(i + 2, 2 + i % 3)} for i in rows]
    for name, content in (("pairs", pairs), ("preferences", preferences), ("texts", [{"text": text(i, 3 + i % 12)} for i in rows])):
        (folder / f"{name}.json").write_text("\n".join(json.dumps(row) for row in content) + "\n")
    (folder / "lines.txt").write_text("\n".join(text(i, 5 + i % 9) for i in range(200)) + "\n")
