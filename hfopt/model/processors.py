"""A model's own processor, without its files: image processor and placeholders as transformers makes them, set up from the model's config.

The processor class does the work: how an image is resized, cut into tiles or patches, and how many placeholder tokens stand for it are
computed by transformers itself, on a blank image. What its constructor needs and a `preprocessor_config.json` would say is read from there
if it lies beside the config, else from the model's config by `_FROM_CONFIG` (what the checkpoints' files say agrees with it).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import quietly
from hfopt.errors import WorkloadError
from hfopt.model.trl_samples import WordTokenizer

_FILES = ("preprocessor_config.json", "processor_config.json")
_CHECKPOINT_PIXELS = {  # min_pixels and max_pixels of the published preprocessor_config.json, where they are not the class's defaults
    "qwen2_vl": (3136, 12_845_056),  # Qwen/Qwen2-VL-2B-Instruct
    "qwen2_5_vl": (3136, 12_845_056),  # Qwen/Qwen2.5-VL-3B-Instruct
    "qwen3_vl": (65_536, 16_777_216),  # Qwen/Qwen3-VL-2B-Instruct
    "qwen3_vl_moe": (65_536, 16_777_216),
}
_KIN = {"qwen3_vl_moe": "qwen3_vl", "glm4v_moe": "glm4v", "shieldgemma2": "gemma3", "fast_vlm": "llava"}
"""Model types that use another's processor without an entry of their own in transformers' tables."""
_SAME_TEXT = {"smolvlm": "idefics3"}
"""The same placeholders; its own class asks for num2words, which only its videos need."""


def vision_config(config: Any) -> Any:
    return getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config


def image_processor(config: Any, folder: Path | None = None, stated: Mapping[str, Any] | None = None) -> Any:
    """The image processor of this model; None where transformers has none for its type."""
    found = _image_processor_class(_KIN.get(config.model_type, config.model_type))
    if found is None:
        return None
    given = {**_from_config(found, config), **_from_file(folder), **(stated or {})}
    able = _settable(found)
    with quietly():
        processor = found(**{name: value for name, value in given.items() if name in able})
    for name in ("image_seq_length",):  # not a field of the class, but read off it
        if name in given:
            setattr(processor, name, given[name])
    return processor


def _image_processor_class(model_type: str) -> Any:
    """The PIL one: it needs no torchvision, and the shapes are the same."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, get_image_processor_class_from_name

    entry = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type)
    if not entry:
        return None
    names = [entry.get("pil"), entry.get("torchvision")] if isinstance(entry, dict) else list(entry)
    name = next((one for one in names if one), None)
    return None if name is None else get_image_processor_class_from_name(name)


def _settable(found: Any) -> frozenset[str]:
    fields = getattr(getattr(found, "valid_kwargs", None), "__annotations__", {})
    return frozenset({*fields, *inspect.signature(found.__init__).parameters, *(name for name in dir(found) if not name.startswith("_"))})


def _from_file(folder: Path | None) -> dict[str, Any]:
    for name in _FILES if folder is not None else ():
        path = folder / name  # type: ignore[operator]
        if path.is_file():
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields = fields.get("image_processor", fields)
            return {key: value for key, value in fields.items() if not key.endswith(("_processor_type", "processor_class", "auto_map"))}
    return {}


def _first(size: Any) -> int | None:
    first = size[0] if isinstance(size, (list, tuple)) and size else size
    return first if isinstance(first, int) else None


def _from_config(found: Any, config: Any) -> dict[str, Any]:
    """What the processor must agree with the model on."""
    vision = vision_config(config)
    given: dict[str, Any] = {}
    for name, source in _FROM_CONFIG.items():
        value = source(config, vision)
        if value is not None:
            given[name] = value
    side = _first(getattr(vision, "image_size", None))
    for name in ("size", "crop_size", "max_image_size"):
        fitted = _fitted(getattr(found, name, None), side)
        if fitted is not None:
            given[name] = fitted
    if side is not None and "max_image_size" in given and hasattr(found, "do_image_splitting"):
        given["size"] = {"longest_edge": _TILED_SIDES * side}
    if config.model_type in _CHECKPOINT_PIXELS:
        given["min_pixels"], given["max_pixels"] = _CHECKPOINT_PIXELS[config.model_type]
    return given


_TILED_SIDES = 4  # Idefics3 and SmolVLM enlarge an image to four tiles along its longer side (size of their preprocessor_config.json)
_ONE_SIDE = ({"height", "width"}, {"shortest_edge"}, {"longest_edge"})


def _fitted(default: Any, side: int | None) -> dict[str, int] | None:
    """The class's own default with the model's image size in it; None where it is not one side that says all."""
    if side is None or not isinstance(default, Mapping) or set(default) not in _ONE_SIDE or max(default.values()) > 4096:
        return None
    return dict.fromkeys(default, side)


def _squared(config: Any, vision: Any) -> int | None:
    """Placeholders of one image (or tile): patches of the tower after the model's own pooling."""
    stated = getattr(config, "mm_tokens_per_image", None)
    if isinstance(stated, int):
        return stated
    side, patch = _first(getattr(vision, "image_size", None)), _first(getattr(vision, "patch_size", None))
    if side is None or not patch:
        return _first(getattr(config, "image_seq_length", None))
    patches = (side // patch) ** 2
    shrink = getattr(config, "scale_factor", None)  # Idefics3
    if isinstance(shrink, int) and shrink > 1:
        return patches // shrink**2
    ratio = getattr(config, "downsample_ratio", None)  # InternVL
    return round(patches * ratio**2) if isinstance(ratio, float) else patches


_FROM_CONFIG: dict[str, Callable[[Any, Any], Any]] = {
    "patch_size": lambda config, vision: _first(getattr(vision, "patch_size", None)),
    "temporal_patch_size": lambda config, vision: getattr(vision, "temporal_patch_size", None),
    "merge_size": lambda config, vision: getattr(vision, "spatial_merge_size", None),
    "image_grid_pinpoints": lambda config, vision: getattr(config, "image_grid_pinpoints", None),
    "max_image_tiles": lambda config, vision: getattr(vision, "max_num_tiles", None),
    "image_seq_length": _squared,
}
"""Setting of an image processor → where the model's config has it (the fields each model's processor file documents)."""

_PROCESSOR_FROM_CONFIG: dict[str, Callable[[Any, Any], Any]] = {
    **_FROM_CONFIG,
    "image_seq_len": _squared,
    "num_image_tokens": _squared,
    "spatial_merge_size": lambda config, vision: getattr(config, "spatial_merge_size", None),
    "vision_feature_select_strategy": lambda config, vision: getattr(config, "vision_feature_select_strategy", None),
    "num_additional_image_tokens": lambda config, vision: int("clip" in str(getattr(vision, "model_type", ""))),  # its class token
    "num_query_tokens": lambda config, vision: getattr(config, "num_query_tokens", None),
    "downsample_factor": lambda config, vision: getattr(config, "downsample_factor", None),
}


def text_processor(config: Any, images: Any) -> Any:
    """The processor that puts placeholders for `images` (an image processor) into a text; None where the type has none."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    model_type = _SAME_TEXT.get(config.model_type, config.model_type)
    name = PROCESSOR_MAPPING_NAMES.get(_KIN.get(model_type, model_type))
    if name is None:
        return None
    found = getattr(transformers, name)
    unchecked = type(name, (found,), {"check_argument_for_proper_class": lambda self, argument_name, argument: None})
    vision, parts = vision_config(config), {"image_processor": images, "tokenizer": WordTokenizer()}
    given: dict[str, Any] = {}
    for parameter in inspect.signature(found.__init__).parameters.values():
        if parameter.name in parts:
            given[parameter.name] = parts[parameter.name]
        elif parameter.name in _PROCESSOR_FROM_CONFIG:
            value = _PROCESSOR_FROM_CONFIG[parameter.name](config, vision)
            given |= {} if value is None else {parameter.name: value}
        elif parameter.default is parameter.empty and parameter.name not in ("self", "args", "kwargs"):
            given[parameter.name] = None  # a part for another kind of input: videos, sound
    with quietly():
        return unchecked(**given)


REFUSALS = (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, OverflowError, RuntimeError)


@contextmanager
def readable(config: Any) -> Iterator[None]:
    """What goes wrong while a processor is set up or run, in one sentence."""
    with quietly():
        try:
            yield
        except ImportError as error:
            why = " ".join(str(error).split())
            raise WorkloadError(f"the processor of a {config.model_type} model cannot run here: {why}") from None
        except REFUSALS as error:
            why = " ".join(str(error).split())
            raise WorkloadError(
                f"the processor of a {config.model_type} model refuses these images: {why}",
                hint="state another image_size (or size) in the YAML",
            ) from error


def blank_image(height: int, width: int) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise WorkloadError(
            "batches with images are made by the model's own processor, which needs Pillow", hint="pip install pillow"
        ) from None
    return Image.new("RGB", (width, height))
