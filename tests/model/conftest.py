"""Tiny models as folders that hold only a config.json, and a way to run a step without weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

TINY: dict[str, dict[str, Any]] = {
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    },
    "roberta": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 66,
        "type_vocab_size": 1,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    },
    "t5": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 100,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    },
    "vit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 32,
        "patch_size": 8,
    },
    "segformer": {
        "depths": [1, 1],
        "hidden_sizes": [16, 32],
        "num_attention_heads": [1, 2],
        "decoder_hidden_size": 16,
        "num_encoder_blocks": 2,
        "sr_ratios": [2, 1],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "mlp_ratios": [2, 2],
    },
    "convnext": {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "drop_path_rate": 0.1, "image_size": 32},
    "wav2vec2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 32,
        "conv_dim": [8, 8],
        "conv_stride": [5, 4],
        "conv_kernel": [10, 8],
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    },
    "whisper": {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 100,
        "max_source_positions": 50,
        "max_target_positions": 40,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "clip": {
        "projection_dim": 16,
        "text_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vocab_size": 100,
            "max_position_embeddings": 16,
            "eos_token_id": 99,
        },
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
    },
}
TINY["git"] = {**TINY["bert"], "vision_config": TINY["clip"]["vision_config"]}
TINY["vision-encoder-decoder"] = {
    "encoder": {"model_type": "vit", **TINY["vit"]},
    "decoder": {"model_type": "gpt2", **TINY["gpt2"], "add_cross_attention": True, "is_decoder": True},
    "is_encoder_decoder": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
TINY["speech_to_text"] = {
    **{key: value for key, value in TINY["whisper"].items() if "token" not in key},
    "is_encoder_decoder": True,
    "input_feat_per_channel": 16,
    "conv_channels": 16,
}
TINY["wav2vec2-bert"] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 32,
    "feature_projection_input_dim": 16,
    "conv_depthwise_kernel_size": 3,
}


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., str]:
    """tiny("bert", architectures=[...]) -> a folder with nothing but that config.json."""

    def make(kind: str, /, **fields: Any) -> str:
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **TINY[kind], **fields}))
        return str(folder)

    return make


class _AnswersItem(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def faked() -> Callable[[], Any]:
    """A context in which tensors are fake and .item() is answered, as in a trace."""

    @contextmanager
    def context() -> Iterator[None]:
        with FakeTensorMode(allow_non_fake_inputs=True), _AnswersItem():
            yield

    return context
