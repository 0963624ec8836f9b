"""What a config says of images: their size and number, and which parts of a vision-language model it freezes."""

from __future__ import annotations

from typing import Any

from hfopt.config.lookup import Facts, whole_number
from hfopt.config.other_tools import is_llama_factory
from hfopt.schema import ModelPart

_EDGES = frozenset({"height", "width", "shortest_edge", "longest_edge", "max_height", "max_width"})
_FACTORY_PIXELS = 768 * 768  # llamafactory 0.9.5, hparams/model_args.py: image_max_pixels, to which larger images are shrunk first
_PART_KEYS: dict[ModelPart, tuple[tuple[str, ...], tuple[str, ...]]] = {  # keys that freeze it, keys that train it
    "vision": (
        ("freeze_vision_tower", "freeze_vision", "freeze_vision_encoder", "freeze_vision_model", "freeze_vit", "freeze_image_encoder"),
        ("tune_mm_vision", "unfreeze_vision_tower", "train_vision_tower", "unfreeze_vision"),
    ),
    "projector": (
        (
            "freeze_multi_modal_projector",
            "freeze_mm_mlp_adapter",
            "freeze_projector",
            "freeze_aligner",
            "freeze_merger",
            "freeze_connector",
        ),
        ("tune_mm_mlp", "tune_mm_mlp_adapter", "train_projector"),
    ),
    "language": (("freeze_language_model", "freeze_llm", "freeze_text_model", "freeze_backbone_llm"), ("tune_mm_llm", "train_llm")),
}
"""LLaMA-Factory, LLaVA, Qwen's own finetuning scripts and ms-swift name the parts of a vision-language model so."""
_FACTORY_FREEZES: tuple[ModelPart, ...] = ("vision", "projector")  # llamafactory 0.9.5, hparams/finetuning_args.py


def frozen_parts(facts: Facts, *, is_factory: bool) -> tuple[ModelPart, ...]:
    found: list[ModelPart] = []
    for part, (freezing, training) in _PART_KEYS.items():
        frozen = facts.true(*freezing) or facts.false(*training)
        trained = facts.false(*freezing) or facts.true(*training)
        if frozen or (is_factory and part in _FACTORY_FREEZES and not trained):
            found.append(part)
    return tuple(found)


def has_images(facts: Facts) -> bool:
    """The file speaks of images."""
    return facts.has(
        *(
            "max_pixels",
            "min_pixels",
            "image_max_pixels",
            "image_min_pixels",
            "images_per_sample",
            "max_images",
            "num_images",
            "image_size",
        ),
        *("image_resolution", "freeze_vision_tower", "image_column", "image_folder", "media_dir", "image_dir"),
    )


def image_facts(facts: Facts) -> dict[str, Any]:
    """The fields of a DataSpec that are about images and videos."""
    return {
        "image_size": _side(facts, "image_size", "img_size", "image_resolution", "image_square_size", "resolution", "input_size"),
        "images_per_sample": _count(
            facts, "images_per_sample", "num_images_per_sample", "max_images_per_sample", "num_images", "max_images"
        ),
        "min_pixels": _count(facts, "min_pixels", "image_min_pixels"),
        "max_pixels": _count(facts, "max_pixels", "image_max_pixels") or (_FACTORY_PIXELS if is_llama_factory(facts) else None),
        "edges": _edges(facts),
        "frames": _count(facts, "num_frames", "frames_per_clip", "max_frames", "num_video_frames"),
    }


def _side(facts: Facts, *names: str) -> int | None:
    """224, or the first of [224, 224]; what cannot be an image's side is kept, so that it is refused and not overlooked."""
    for _, value in facts.all(*names):
        value = value[0] if isinstance(value, list) and value else value
        if (number := whole_number(value)) is not None:
            return number
    return None


def _count(facts: Facts, *names: str) -> int | None:
    return next((number for _, value in facts.all(*names) if (number := whole_number(value)) is not None), None)


def _edges(facts: Facts) -> dict[str, int] | None:
    """An image processor's size, as {shortest_edge: 800, longest_edge: 1333} or {height: 640, width: 640}."""
    for _, value in facts.all("size", "image_size", "processor_size"):
        if isinstance(value, dict) and value and set(value) <= _EDGES:
            found = {name: number for name, edge in value.items() if (number := whole_number(edge)) is not None}
            if len(found) == len(value):
                return found
    return None
