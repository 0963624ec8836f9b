"""Three small models and their batches: built by the test, and by the Trainer run that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

LENGTH, TARGET_LENGTH = 128, 32


def bert() -> Any:
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
    return BertForSequenceClassification(BertConfig(vocab_size=2000, num_labels=3, **sizes))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=1000, n_positions=256))


def t5() -> Any:
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=2000, decoder_start_token_id=0, **sizes))


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "gpt2": gpt2, "t5": t5}


def batch_of(name: str, size: int) -> dict[str, Any]:
    ids = torch.ones(size, LENGTH, dtype=torch.long)
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids.clone()}
    labels = torch.zeros(size, dtype=torch.long) if name == "bert" else torch.ones(size, TARGET_LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
