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
