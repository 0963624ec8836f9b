"""Batches for object detection: images as the image processor resizes and pads them, and boxes with classes for each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfopt.errors import WorkloadError
from hfopt.model.image_text import LARGEST_SIDE
from hfopt.model.processors import blank_image, image_processor, readable
from hfopt.schema import Assumption, DataSpec

BOXES = 10  # an image; COCO has 7.3 (Lin et al. 2014)
PHOTO = (480, 640)  # COCO's usual image, where no size is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionImage:
    height: int  # as the model gets it
    width: int
    masked: bool  # padding is told in a pixel_mask
    assumed: tuple[Assumption, ...] = ()


def detection_image(config: Any, data: DataSpec, folder: Path | None) -> DetectionImage:
    """A stated image_size is a square that all images are brought to; else the processor says what becomes of a usual photo."""
    boxes = Assumption(what="boxes", value=f"{BOXES} an image", guessed=True)
    side = data.image_size
    if side is not None:
        if not 1 <= side <= LARGEST_SIDE:
            raise WorkloadError(f"images of {side} pixels a side cannot be made", hint=f"state an image_size from 1 to {LARGEST_SIDE}")
        size = Assumption(what="image", value=f"{side} × {side} pixels", settle="image_size")
        return DetectionImage(height=side, width=side, masked=True, assumed=(size, boxes))
    with readable(config):
        images = image_processor(config, folder, {"size": dict(data.edges)} if data.edges else None)
        if images is None:
            raise WorkloadError(f"the size of images for a {config.model_type} model is not known", hint="state image_size in the YAML")
        found = images(images=[blank_image(*PHOTO)], return_tensors="pt")
    height, width = found["pixel_values"].shape[-2:]
    made = f"{PHOTO[0]} × {PHOTO[1]} pixels, {height} × {width} after the processor"
    size = Assumption(what="image", value=made, guessed=data.edges is None, settle="image_size")
    return DetectionImage(height=height, width=width, masked="pixel_mask" in found, assumed=(size, boxes))


def targets(samples: int) -> list[dict[str, torch.Tensor]]:
    """Boxes as center, width and height in shares of the image, as transformers' processors make them."""
    box = torch.tensor([0.5, 0.5, 0.2, 0.2])
    return [{"class_labels": torch.zeros(BOXES, dtype=torch.long), "boxes": box.repeat(BOXES, 1)} for _ in range(samples)]
