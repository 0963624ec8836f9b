"""The parts of a vision-language model by name: its vision tower, its projector, its language model; frozen, or left out of LoRA."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from hfopt.schema import ModelPart

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
