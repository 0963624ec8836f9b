"""Configurations shrink by the names of their sizes, and stay whole."""

from __future__ import annotations

from hfopt.probe.neutrality import has_image_size, shrink


def test_sizes_shrink_and_dropout_goes() -> None:
    fields = {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
        "eos_token_id": [30000, 3],
        "pad_token_id": 30521,
        "hidden_dropout_prob": 0.1,
        "layerdrop": 0.2,
        "use_cache": True,
        "layer_types": ["full_attention"] * 24,
        "hidden_act": "gelu",
    }
    small = shrink(fields)
    assert (small["hidden_size"], small["num_hidden_layers"], small["num_attention_heads"]) == (32, 2, 2)
    assert small["hidden_size"] % small["num_attention_heads"] == 0
    assert small["vocab_size"] == 128
    assert small["pad_token_id"] < 128 and max(small["eos_token_id"]) < 128
    assert (small["hidden_dropout_prob"], small["layerdrop"]) == (0.0, 0.0)
    assert small["layer_types"] is None
    assert (small["use_cache"], small["hidden_act"], small["model_type"]) == (True, "gelu", "bert")
    assert fields["hidden_size"] == 1024


def test_what_is_smaller_already_stays() -> None:
    assert shrink({"hidden_size": 16, "num_key_value_heads": 1}) == {"hidden_size": 16, "num_key_value_heads": 1}


def test_images_stay_whole_patches() -> None:
    small = shrink({"image_size": 518, "patch_size": 14, "hidden_size": 768})
    assert small["image_size"] % 14 == 0 and small["image_size"] < 100
    staged = {"image_size": 224, "embed_dim": 96, "num_heads": [3, 6], "depths": [2, 6]}
    assert shrink(staged) == staged | {"depths": [1, 1]}


def test_parts_shrink_too() -> None:
    small = shrink({"vision_config": {"image_size": 224, "patch_size": 32, "num_hidden_layers": 12}, "projection_dim": 512})
    assert small["vision_config"] == {"image_size": 64, "patch_size": 32, "num_hidden_layers": 2}
    assert has_image_size(small) and not has_image_size({"text_config": {}})
