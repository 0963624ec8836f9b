"""Batches of images and text: the model's own processor decides the pixels' layout and the number of placeholders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hfopt.errors import WorkloadError
from hfopt.model.from_config import from_spec
from hfopt.schema import DataSpec, Lora, ModelSpec, Workload

FAMILIES = json.loads((Path(__file__).parents[2] / "benchmarks" / "data" / "tiny_families.json").read_text())
IMAGE_TOKEN = 8001

Make = Callable[..., Workload]


@pytest.fixture
def tiny(tmp_path: Path) -> Make:
    def make(name: str, *, spec: dict[str, Any] | None = None, **data: Any) -> Workload:
        (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
        return from_spec(ModelSpec(name=str(tmp_path), weights_dtype="float32", **(spec or {})), DataSpec(**data))

    return make


def _shapes(batch: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in batch.items()}


@pytest.mark.parametrize(
    ("name", "data", "pixels", "placeholders"),
    [
        ("qwen2_vl", {"image_size": 420}, (2 * 900, 1176), 225),  # 30 × 30 patches of 14, four to a token
        ("qwen2_5_vl", {"max_pixels": 200704}, (2 * 1024, 1176), 256),
        ("qwen3_vl", {"image_size": 512}, (2 * 1024, 1536), 256),  # patches of 16
        ("llava", {}, (2, 3, 336, 336), 576),
        ("llava_next", {"image_size": 672}, (2, 5, 3, 336, 336), 576 + 48 * 49),  # four tiles with a newline a row, and the whole
        ("paligemma", {}, (2, 3, 224, 224), 256),
        ("idefics3", {"image_size": 700}, (2, 17, 3, 364, 364), 17 * 169),
        ("smolvlm", {}, (2, 17, 3, 256, 256), 17 * 64),
        ("gemma3", {}, (2, 3, 224, 224), 64),
        ("mllama", {}, (2, 1, 4, 3, 224, 224), 1),
        ("internvl", {}, (2, 3, 224, 224), 64),  # its placeholder is the tokenizer's `context_image_token`
    ],
)
def test_pixels_and_placeholders(tiny: Make, name: str, data: dict[str, Any], pixels: tuple[int, ...], placeholders: int) -> None:
    batch = tiny(name, **data).make_batch(2)
    assert tuple(batch["pixel_values"].shape) == pixels
    assert (batch["input_ids"] == IMAGE_TOKEN).sum(1).tolist() == [placeholders] * 2
    assert (batch["labels"][batch["input_ids"] == IMAGE_TOKEN] == -100).all(), "placeholders are not learned"
    assert batch["attention_mask"][0].all() and not batch["attention_mask"][-1].all(), "the last sample is shorter"


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next", "gemma3", "smolvlm", "internvl"])
def test_the_model_takes_the_batch(tiny: Make, name: str) -> None:
    """The real model counts placeholders against what its tower returns, and refuses another number."""
    workload = tiny(name, image_size=None if name in ("gemma3", "internvl") else 224)
    torch.manual_seed(0)
    model = workload.build_model()
    assert torch.isfinite(model(**workload.make_batch(1)).loss)


def test_several_images(tiny: Make) -> None:
    one, two = (tiny("qwen2_vl", image_size=420, images_per_sample=count).make_batch(2) for count in (1, 2))
    assert two["pixel_values"].shape[0] == 2 * one["pixel_values"].shape[0]
    assert (two["input_ids"] == IMAGE_TOKEN).sum() == 2 * (one["input_ids"] == IMAGE_TOKEN).sum()
    assert _shapes(tiny("qwen2_vl", images_per_sample=0, max_length=64).make_batch(2)).keys() == {"input_ids", "attention_mask", "labels"}


def test_a_preprocessor_config_beside_the_model_is_read(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"max_pixels": 50176, "min_pixels": 3136, "merge_size": 2, "patch_size": 14})
    )
    assert tiny("qwen2_vl", image_size=1024).make_batch(1)["pixel_values"].shape[0] == 256


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("llava", {"image_size": 448}, "takes images of 336 × 336 pixels, not 448 × 448"),
        ("qwen2_vl", {"image_size": -3}, "images of -3 pixels a side cannot be made"),
        ("qwen2_vl", {"image_size": 99999}, "images of 99999 pixels a side cannot be made"),
        ("qwen2_vl", {"min_pixels": 90000, "max_pixels": 10000}, r"min_pixels \(90000\) is over max_pixels \(10000\)"),
        ("qwen2_vl", {"max_pixels": 0}, "max_pixels is 0; it must be at least 1"),
        ("qwen2_vl", {"image_size": 840, "max_length": 512}, "take 9.. tokens, which a length of 512 cannot hold"),
    ],
)
def test_images_that_cannot_be(tiny: Make, name: str, data: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        tiny(name, **data)


def test_parts_that_do_not_train(tiny: Make) -> None:
    whole, half = (tiny("qwen3_vl", spec={"frozen_parts": parts}) for parts in ((), ("vision",)))
    frozen = [name for name, parameter in half.build_model().named_parameters() if not parameter.requires_grad]
    assert half.trainable_parameters < whole.trainable_parameters == whole.parameters
    assert frozen and all(name.startswith("model.visual.") and ".visual.merger." not in name for name in frozen)
    adapted = tiny("qwen3_vl", spec={"frozen_parts": ("vision", "projector"), "lora": Lora(target_modules="all-linear")}).build_model()
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained and not any("visual" in name for name in trained)


QWEN35: dict[str, Any] = {
    **{"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 990, "video_token_id": 991},
    **{"vision_start_token_id": 992, "vision_end_token_id": 993},
    "text_config": {
        **{"model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000, "intermediate_size": 128},
        **{"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    },
    "vision_config": {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64},
}


@pytest.mark.parametrize(
    ("config", "trainer", "class_name"),
    [
        (QWEN35, "Trainer", "Qwen3_5ForCausalLM"),
        (QWEN35, "SFT", "Qwen3_5ForConditionalGeneration"),
        (FAMILIES["mllama"], "Trainer", "MllamaForCausalLM"),
    ],
    ids=["qwen3_5", "qwen3_5-sft", "mllama"],
)
def test_text_alone_trains_a_vision_language_model(tmp_path: Path, config: dict[str, Any], trainer: str, class_name: str) -> None:
    """The language model by itself from its part of the config; TRL and LLaMA-Factory load the class that the checkpoint names."""
    if config["model_type"] not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers has no {config['model_type']}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = from_spec(ModelSpec(name=str(tmp_path), task="causal_lm", weights_dtype="float32"), DataSpec(max_length=16), trainer=trainer)
    model, batch = workload.build_model(), workload.make_batch(2)
    assert type(model).__name__ == class_name and "pixel_values" not in batch
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
