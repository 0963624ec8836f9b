"""Vision-language models: their parts by name, and one sample of images and text as the processor makes it.

The processor runs once, on blank images. All samples of a batch are alike but for the padding of the last one, so a batch is that sample,
repeated along the first dimension of each tensor: samples, images, tiles and patches are all counted there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfopt.compat.transformers_patches import quietly
from hfopt.errors import WorkloadError
from hfopt.model.processors import REFUSALS, blank_image, image_processor, readable, text_processor
from hfopt.model.trl_samples import WORD
from hfopt.schema import Assumption, DataSpec, ModelPart

PART_NAMES: dict[ModelPart, tuple[str, ...]] = {
    "vision": ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower", "vision_embed_tokens", "vpm"),
    "projector": (
        "multi_modal_projector",
        "mm_projector",
        "connector",
        "embed_vision",
        "aligner",
        "qformer",
        "language_projection",
        "merger",
    ),
    "language": ("language_model", "text_model", "lm_head"),
}
"""What transformers calls the parts of a vision-language model (PreTrainedModel.get_encoder lists the towers); Qwen-VL's projector is the
`merger` inside its tower."""


def part_modules(model: nn.Module, part: ModelPart) -> tuple[str, ...]:
    """The outermost modules of that part; a projector inside the tower is not the tower."""
    names = [name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in PART_NAMES[part]]
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def freeze_parts(model: nn.Module, parts: Sequence[ModelPart]) -> None:
    """A model without such a part has nothing to freeze: LLaMA-Factory's defaults stand in text models' files too."""
    projector = part_modules(model, "projector")
    for part in parts:
        for module in part_modules(model, part):
            for name, parameter in model.get_submodule(module).named_parameters(prefix=module):
                if part == "projector" or not name.startswith(tuple(f"{inner}." for inner in projector)):
                    parameter.requires_grad = False


def modules_of_parts(model: nn.Module, parts: Sequence[ModelPart]) -> str | None:
    """A pattern of the modules in these parts, where no adapter goes."""
    modules = [module for part in parts for module in part_modules(model, part)]
    return rf"(?:{'|'.join(map(re.escape, modules))})(?:\..*)?" if modules else None


WORDS = 256  # of text beside the images, where no length is stated
PHOTO_SIDE = 1024  # of an image, where the processor keeps what it gets and nothing says how large that is
LARGEST_SIDE = 16_384
_ONE_SIDE = ({"height", "width"}, {"shortest_edge"})
_EDGES = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
_TILED = ("image_grid_pinpoints", "do_image_splitting", "max_image_tiles", "crop_to_patches", "merge_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTextSample:
    tensors: Mapping[str, Any]  # one sample, without labels
    image_tokens: int  # placeholders and the tags around them, at the front
    height: int  # of the image that the processor was given
    width: int
    images: int
    assumed: tuple[Assumption, ...] = ()

    def of_length(self, length: int) -> dict[str, Any]:
        """The same images with words after them, up to so many tokens."""
        short = self.tensors["input_ids"].shape[1]
        return {name: _longer(value, short, length) for name, value in self.tensors.items()}


def repeated(value: Any, samples: int) -> Any:
    """A batch of one, as a batch of many; pixels are 1, because 0 means padding to some models."""
    if isinstance(value, list):
        return value * samples
    if not isinstance(value, torch.Tensor):
        return value
    size = (value.shape[0] * samples, *value.shape[1:])
    return torch.ones(size, dtype=value.dtype) if value.is_floating_point() else value.repeat(samples, *([1] * (value.dim() - 1)))


def labels_of(ids: torch.Tensor) -> torch.Tensor:
    """Words are learned, placeholders are not."""
    return torch.where(ids == WORD, ids, torch.full_like(ids, -100))


def _longer(value: Any, short: int, length: int) -> Any:
    """Masks and token types go on as they end."""
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.dim() < 2 or value.shape[:2] != (1, short):
        return value
    return torch.cat([value, *[value[:, -1:]] * (length - short)], dim=1)


def image_text_sample(config: Any, data: DataSpec, folder: Path | None, accepts: frozenset[str] = frozenset()) -> ImageTextSample:
    """Runs the processor on as many blank images as a sample has."""
    with readable(config):
        images = image_processor(config, folder, _stated(data))
        processor = None if images is None else text_processor(config, images)
    if processor is None:
        raise WorkloadError(
            f"how a {config.model_type} model takes images is not known: transformers has no processor for it",
            hint="plan it from a live Trainer (hfopt run), whose own batches are traced",
        )
    height, width, guessed = _raw_size(images, config, data)
    count = data.images_per_sample or 1
    found = _processed(processor, config, [blank_image(height, width)] * count, (height, width))
    if "token_type_ids" in accepts and "token_type_ids" not in found:  # PaliGemma's: the words are the suffix, which is learned
        found["token_type_ids"] = (found["input_ids"] == WORD).long()
    tokens = found["input_ids"].shape[1] - 1
    assumed = (
        Assumption(what="images", value=f"{count} a sample", guessed=data.images_per_sample is None, settle="images_per_sample"),
        Assumption(what="image", value=f"{height} × {width} pixels, {tokens} tokens", guessed=guessed, settle="image_size or max_pixels"),
    )
    return ImageTextSample(tensors=found, image_tokens=tokens, height=height, width=width, images=count, assumed=assumed)


def _processed(processor: Any, config: Any, pictures: list[Any], size: tuple[int, int]) -> dict[str, Any]:
    token = getattr(processor, "image_token", None) or "<image>"
    text = [" ".join(f"{token} word" for _ in pictures)]  # words between, as chat templates put their tags
    with quietly():
        try:
            found = dict(processor(images=[pictures], text=text, return_tensors="pt"))
        except REFUSALS as error:
            why = " ".join(str(error).split())
            raise WorkloadError(
                f"{type(processor).__name__} refuses an image of {size[0]} × {size[1]} pixels: {why}",
                hint="state another image_size (or max_pixels) in the YAML",
            ) from error
    for tag, number in processor.tokenizer.ids_for(processor, config).items():
        found["input_ids"][found["input_ids"] == tag] = number
    return found


def _stated(data: DataSpec) -> dict[str, Any]:
    """What the YAML says of the processor's settings."""
    given: dict[str, Any] = {}
    if data.min_pixels is not None and data.max_pixels is not None and data.min_pixels > data.max_pixels:
        raise WorkloadError(f"min_pixels ({data.min_pixels}) is over max_pixels ({data.max_pixels})", hint="state min_pixels ≤ max_pixels")
    for name, value in (("min_pixels", data.min_pixels), ("max_pixels", data.max_pixels)):
        if value is not None:
            if value < 1:
                raise WorkloadError(f"{name} is {value}; it must be at least 1")
            given[name] = value
    return {**given, "size": dict(data.edges)} if data.edges else given


def _raw_size(images: Any, config: Any, data: DataSpec) -> tuple[int, int, bool]:
    """Height and width of the image the processor is given, and whether they are a guess."""
    side = data.image_size
    if side is not None and not 1 <= side <= LARGEST_SIDE:
        raise WorkloadError(f"images of {side} pixels a side cannot be made", hint=f"state an image_size from 1 to {LARGEST_SIDE}")
    fixed = fixed_side(images)
    if fixed is not None:
        if side is not None and side != fixed:
            raise WorkloadError(
                f"the vision tower of this {config.model_type} model takes images of {fixed} × {fixed} pixels, not {side} × {side}",
                hint="leave image_size out (its processor resizes every image), or name the checkpoint made for that size",
            )
        return fixed, fixed, False
    if side is not None:
        return side, side, False
    if data.max_pixels is not None:
        side = min(LARGEST_SIDE, math.isqrt(data.max_pixels))
        return side, side, True
    return PHOTO_SIDE, PHOTO_SIDE, True


def fixed_side(images: Any) -> int | None:
    """The one size that every image is brought to; None where the processor cuts tiles or keeps the aspect."""
    stated = getattr(images, "size", None)
    size = {key: value for key in _EDGES if (value := _edge(stated, key)) is not None}
    tiled = any(getattr(images, name, None) for name in _TILED)
    if tiled or set(size) not in _ONE_SIDE or len(set(size.values())) != 1:
        return None
    if "shortest_edge" in size and not getattr(images, "do_center_crop", False):
        return None
    return int(next(iter(size.values())))


def _edge(size: Any, key: str) -> int | None:
    """Of a dict, or of transformers' SizeDict."""
    return size.get(key) if isinstance(size, Mapping) else getattr(size, key, None)
