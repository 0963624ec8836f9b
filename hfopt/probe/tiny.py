"""A tiny configuration of the same architecture: what its class does stays, what it costs goes.

Sizes shrink by the names configs use for them; dropout goes to zero, so that two runs can be compared. Sub-configs shrink likewise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MOST: tuple[tuple[str, int], ...] = (
    # the first pattern that matches the whole key decides
    (r"vocab_size|.*_vocab_size(_per_layer_input)?", 128),
    (r"num_hidden_groups|inner_group_num", 1),
    (r"(num_)?(hidden_|encoder_|decoder_|n_)*layers?(_num)?|n_layer|num_(encoder|decoder)_blocks", 2),
    (r"num_key_value_heads|num_kv_heads", 2),
    (r"(num_|n_|encoder_|decoder_)*(attention_)?heads?|n_head|num_heads", 2),
    (r"head_dim|d_kv|.*_head_dim", 16),
    (r"hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|word_embed_proj_dim|projection_dim|output_hidden_size", 32),
    (r"conv_dim|hidden_sizes|classifier_proj_size|codevector_dim|proj_codevector_dim", 32),
    (r"(moe_)?intermediate_size|ffn_dim|(encoder|decoder)_ffn_dim|d_ff|n_inner|hidden_dim|ffn_hidden_size", 64),
    (r"num_(local_|routed_)?experts|n_routed_experts", 4),
    (r"max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_sequence_length", 128),
    (r"num_labels", 3),
)
_RULES = tuple((re.compile(pattern), most) for pattern, most in _MOST)
SMALL_IMAGE = 64  # pixels a side, rounded up to whole patches
_DROPOUT = re.compile(r".*(drop|dropout|pdrop|dropout_prob|dropout_rate|layerdrop|drop_path_rate|_dropout_p)$|mask_(time|feature)_prob")
_DEPENDENT = frozenset(
    {
        "layer_types",
        "mlp_layer_types",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
        "out_features",
        "out_indices",
        "stage_names",
    }
)
"""Lists and tables that follow from the sizes: None makes the class fill them in again."""
_WIDTHS = frozenset({"embed_dim", "hidden_size", "hidden_sizes"})


def shrink(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json, tiny."""
    staged = any(isinstance(fields.get(key), (list, tuple)) for key in ("num_heads", "num_attention_heads"))  # widths follow the heads
    small = {key: value if staged and key in _WIDTHS else _small(key, value) for key, value in fields.items()}
    if isinstance(small.get("image_size"), int) and not staged:
        patch = small["patch_size"] if isinstance(small.get("patch_size"), int) else 1
        small["image_size"] = -(-SMALL_IMAGE // patch) * patch
    vocabulary = small.get("vocab_size")
    if isinstance(vocabulary, int):
        for key, value in small.items():
            if key.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
                small[key] = 1
            elif key.endswith("_token_id") and isinstance(value, list):
                small[key] = [min(item, 1) for item in value]
    return small


def _small(key: str, value: Any) -> Any:
    if key in _DEPENDENT:
        return None
    if isinstance(value, Mapping) and (key.endswith("_config") or key == "config"):
        return shrink(value)
    if _DROPOUT.match(key) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return 0.0
    if key == "depths" and isinstance(value, list):
        return [1] * len(value)
    most = next((most for pattern, most in _RULES if pattern.fullmatch(key)), None)
    if most is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return min(value, most)
    if isinstance(value, (list, tuple)) and key in ("conv_dim", "hidden_sizes"):
        return [min(item, most) for item in value]
    return value


def has_image_size(fields: Mapping[str, Any]) -> bool:
    """Whether the configuration fixes the size of images, itself or in a part."""
    return "image_size" in fields or any(has_image_size(part) for part in fields.values() if isinstance(part, Mapping))
