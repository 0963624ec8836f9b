"""Small workloads, made by hand from transformers' own configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hfopt.schema import BatchShape, Workload


@pytest.fixture
def tiny_gpt2() -> Callable[..., Workload]:
    """A two-layer GPT-2 that reads 64 tokens."""

    def make(length: int = 64, **overrides: Any) -> Workload:
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(**{"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1000, "n_positions": 256, **overrides})

        def batch(size: int) -> dict[str, Any]:
            ids = torch.ones(size, length, dtype=torch.long)
            return {"input_ids": ids, "labels": ids.clone()}

        return Workload(
            name="tiny-gpt2",
            model_class="GPT2LMHeadModel",
            task="causal_lm",
            build_model=lambda: GPT2LMHeadModel(config),
            make_batch=batch,
            shape=BatchShape(kind="text", length=length),
            parameters=0,
            trainable_parameters=0,
        )

    return make


@pytest.fixture
def tiny_wav2vec2() -> Callable[..., Workload]:
    """A two-layer Wav2Vec2ForCTC that hears one second (49 frames) and spells the given number of characters."""

    def make(characters: int = 12, longest: int | None = None) -> Workload:
        import torch
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        config = Wav2Vec2Config(
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            conv_dim=(32,) * 7,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            apply_spec_augment=False,
        )

        def batch(size: int) -> dict[str, Any]:
            labels = torch.ones(size, characters, dtype=torch.long)
            labels[:, longest or characters :] = -100
            return {"input_values": torch.zeros(size, 16000), "labels": labels}

        return Workload(
            name="tiny-wav2vec2",
            model_class="Wav2Vec2ForCTC",
            task="ctc",
            build_model=lambda: Wav2Vec2ForCTC(config),
            make_batch=batch,
            shape=BatchShape(kind="audio", length=16000),
            parameters=0,
            trainable_parameters=0,
        )

    return make
