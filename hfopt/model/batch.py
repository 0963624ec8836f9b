"""What one batch looks like: the inputs and labels of a model's kind and head, from texts to boxes and time series.

Sources: transformers' modeling_patchtst.py and modeling_patchtsmixer.py (context_length × num_input_channels);
modeling_time_series_transformer.py, modeling_informer.py and modeling_autoformer.py (the past is longer by the largest lag, and each
moment has features).

Values are harmless stand-ins (token 1, label 0, silence); only shapes, types and the padding of the attention mask matter. A padded batch
has zeros in its mask, because kernels are chosen by that: its last sample is a quarter shorter than the longest.

Batches as a flash-attention package sees them: padding cut out, several samples in one row (padding-free) laid out as rows of their own.
The package computes attention within each sample. Its stand-in in a trace is PyTorch's own kernel, which does so for rows without a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfopt.errors import WorkloadError
from hfopt.model.processors import blank_image, image_processor, readable
from hfopt.model.vision_language import LARGEST_SIDE, ImageTextSample, labels_of, repeated
from hfopt.schema import Assumption, BatchShape, DataSpec, Task

BOXES = OBJECTS = 10  # an image; COCO has 7.3 (Lin et al. 2014)
PHOTO = (480, 640)  # COCO's usual image, where no size is stated


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionImage:
    height: int  # as the model gets it
    width: int
    masked: bool  # a pixel_mask says where padding is
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


def lengths(config: Any) -> tuple[int, int]:
    """How many moments of the past a sample has, and how many of the future."""
    past = int(config.context_length) + max(getattr(config, "lags_sequence", None) or (0,))
    return past, int(getattr(config, "prediction_length", None) or 1)


def series(config: Any, model_class: str, accepts: frozenset[str], samples: int) -> dict[str, Any]:
    past, future = lengths(config)
    channels = getattr(config, "num_input_channels", None)
    width: tuple[int, ...] = () if channels is None and getattr(config, "input_size", 1) == 1 else (channels or config.input_size,)
    shapes = {
        "past_values": (samples, past, *width),
        "past_observed_mask": (samples, past, *width),
        "future_values": (samples, future, *width),
        "past_time_features": (samples, past, getattr(config, "num_time_features", 0)),
        "future_time_features": (samples, future, getattr(config, "num_time_features", 0)),
    }
    batch: dict[str, Any] = {name: torch.ones(shape) for name, shape in shapes.items() if name in accepts and 0 not in shape}
    if "num_input_channels" in dir(config):
        batch.pop("past_observed_mask", None)  # made by the model, where all is observed
    kinds, reals = (int(getattr(config, f"num_static_{name}_features", None) or 0) for name in ("categorical", "real"))
    if kinds and "static_categorical_features" in accepts:
        batch["static_categorical_features"] = torch.zeros((samples, kinds), dtype=torch.long)
    if reals and "static_real_features" in accepts:
        batch["static_real_features"] = torch.ones((samples, reals))
    if "target_values" in accepts:
        batch["target_values"] = _target(config, model_class, samples)
    return batch


def _target(config: Any, model_class: str, samples: int) -> torch.Tensor:
    if "Classification" in model_class:
        return torch.zeros(samples, dtype=torch.long)
    return torch.ones(samples, int(getattr(config, "num_targets", 1)))


Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMaker:
    """Makes batches for one model class; a callable, so that it can stand as `Workload.make_batch`."""

    task: Task
    shape: BatchShape
    config: Any
    main_input: str
    accepts: frozenset[str]
    sample: ImageTextSample | None = None  # as the processor made it
    model_class: str = ""

    def __call__(self, samples: int) -> Batch:
        if samples < 1:
            raise WorkloadError(f"a batch of {samples} samples cannot be made", hint="the smallest batch size is 1")
        make = _MAKERS.get(self.shape.kind)
        assert make is not None, self.shape.kind
        return make(self, samples)

    def full(self, size: tuple[int, ...], value: int = 0) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.long, device="cpu")

    def floats(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.float32, device="cpu")


def accepted_inputs(model_class: type) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)  # type: ignore[attr-defined]


def _tokens(maker: BatchMaker, samples: int, length: int) -> Batch:
    """input_ids, attention_mask and, for models with segments, token_type_ids."""
    batch = {"input_ids": maker.full((samples, length), 1)}
    if "attention_mask" in maker.accepts:
        batch["attention_mask"] = _mask(maker, samples, length)
    if "token_type_ids" in maker.accepts and (getattr(maker.config, "type_vocab_size", 0) or 0) > 1:
        batch["token_type_ids"] = maker.full((samples, length))
    return batch


def _mask(maker: BatchMaker, samples: int, length: int) -> torch.Tensor:
    mask = maker.full((samples, length), 1)
    if maker.shape.padded and length > 1:
        mask[-1, length - max(1, length // 4) :] = 0
    return mask


def _token_labels(maker: BatchMaker, samples: int, length: int, value: int = 1) -> torch.Tensor:
    labels = maker.full((samples, length), value)
    if maker.shape.padded and length > 1:
        labels[-1, length - max(1, length // 4) :] = -100
    return labels


def _class_labels(maker: BatchMaker, samples: int) -> torch.Tensor:
    problem = getattr(maker.config, "problem_type", None)
    if problem == "multi_label_classification":
        return maker.floats((samples, maker.config.num_labels))
    if problem == "regression" or (problem is None and maker.config.num_labels == 1):
        return maker.floats((samples,))
    return maker.full((samples,))


def _text(maker: BatchMaker, samples: int) -> Batch:
    length = maker.shape.length
    assert length is not None
    batch = _tokens(maker, samples, length)
    if maker.task == "question_answering":
        return {**batch, "start_positions": maker.full((samples,)), "end_positions": maker.full((samples,))}
    if maker.task == "sequence_classification":
        return {**batch, "labels": _class_labels(maker, samples)}
    if maker.task == "embedding":
        positive = {f"positive_{name}": tensor for name, tensor in _tokens(maker, samples, length).items()}
        return {**batch, **positive}
    return {**batch, "labels": _token_labels(maker, samples, length, 0 if maker.task == "token_classification" else 1)}


def _text_to_text(maker: BatchMaker, samples: int) -> Batch:
    length, target = maker.shape.length, maker.shape.target_length
    assert length is not None and target is not None
    return {**_tokens(maker, samples, length), "labels": _token_labels(maker, samples, target)}


def _pixels(maker: BatchMaker, samples: int) -> torch.Tensor:
    shape = maker.shape
    assert shape.channels is not None and shape.height is not None and shape.width is not None
    return maker.floats((samples, shape.channels, shape.height, shape.width))


def _image(maker: BatchMaker, samples: int) -> Batch:
    shape = maker.shape
    assert shape.height is not None and shape.width is not None
    if "mask_labels" in maker.accepts:
        return _masked_objects(maker, samples)
    if maker.task == "semantic_segmentation":
        labels = maker.full((samples, shape.height, shape.width))
    else:
        labels = _class_labels(maker, samples)
    return {"pixel_values": _pixels(maker, samples), "labels": labels}


def _masked_objects(maker: BatchMaker, samples: int) -> Batch:
    """A mask and a class for each object, sample by sample, as the processors of Mask2Former and its kin make them."""
    shape = maker.shape
    assert shape.height is not None and shape.width is not None
    mask = {"pixel_mask": maker.full((samples, shape.height, shape.width), 1)} if "pixel_mask" in maker.accepts else {}
    masks = [maker.floats((OBJECTS, shape.height, shape.width)) for _ in range(samples)]
    return {"pixel_values": _pixels(maker, samples), **mask, "mask_labels": masks, "class_labels": [maker.full((OBJECTS,)) for _ in masks]}


def _detection(maker: BatchMaker, samples: int) -> Batch:
    pixels, shape = _pixels(maker, samples), maker.shape
    assert shape.height is not None and shape.width is not None
    mask = {"pixel_mask": maker.full((samples, shape.height, shape.width), 1)} if shape.padded else {}
    if mask and samples > 1:
        mask["pixel_mask"][-1, shape.height - shape.height // 4 :] = 0
    return {"pixel_values": pixels, **mask, "labels": targets(samples)}


def _video(maker: BatchMaker, samples: int) -> Batch:
    shape = maker.shape
    assert shape.frames is not None and shape.channels is not None and shape.height is not None and shape.width is not None
    pixels = maker.floats((samples, shape.frames, shape.channels, shape.height, shape.width))
    return {maker.main_input: pixels, "labels": _class_labels(maker, samples)}


def _series(maker: BatchMaker, samples: int) -> Batch:
    return series(maker.config, maker.model_class, maker.accepts, samples)


def _sound(maker: BatchMaker, samples: int) -> Batch:
    """Raw samples (input_values) or a spectrogram (frames × bins, or bins × frames as Whisper has it)."""
    config, shape = maker.config, maker.shape
    assert shape.audio_samples is not None
    if shape.height is None:
        batch: Batch = {maker.main_input: maker.floats((samples, shape.audio_samples))}
        if "attention_mask" in maker.accepts and getattr(config, "feat_extract_norm", "layer") == "layer":
            batch["attention_mask"] = _mask(maker, samples, shape.audio_samples)
        return batch
    assert shape.width is not None
    batch = {maker.main_input: maker.floats((samples, shape.height, shape.width))}
    if "attention_mask" in maker.accepts and config.model_type in _MASKED_FRAMES:
        batch["attention_mask"] = _mask(maker, samples, shape.height)
    return batch


_MASKED_FRAMES = ("speech_to_text", "wav2vec2-bert", "seamless_m4t", "seamless_m4t_v2")
"""Spectrogram models whose feature extractor returns a mask over frames; Whisper and AST take fixed windows without one."""


def _audio(maker: BatchMaker, samples: int) -> Batch:
    batch = _sound(maker, samples)
    if maker.task == "audio_classification":
        return {**batch, "labels": _class_labels(maker, samples)}
    assert maker.shape.target_length is not None
    return {**batch, "labels": _token_labels(maker, samples, maker.shape.target_length)}


def _image_text(maker: BatchMaker, samples: int) -> Batch:
    length = maker.shape.length
    assert length is not None
    if maker.sample is not None:
        return _processed(maker, maker.sample, samples, length)
    pixels = {"pixel_values": _pixels(maker, samples)}
    if maker.main_input == "pixel_values":  # an image encoder with a text decoder: the text is the target
        return {**pixels, "labels": _token_labels(maker, samples, length)}
    batch = {**_tokens(maker, samples, length), **pixels}
    if "return_loss" in maker.accepts:
        return {**batch, "return_loss": True}
    return {**batch, "labels": _token_labels(maker, samples, length)}


def _processed(maker: BatchMaker, sample: ImageTextSample, samples: int, length: int) -> Batch:
    """The last sample's text is a quarter shorter."""
    batch = {name: repeated(value, samples) for name, value in sample.of_length(length).items()}
    labels = labels_of(batch["input_ids"])
    missing = (length - sample.image_tokens) // 4 if maker.shape.padded else 0
    if missing:
        labels[-1, length - missing :] = -100
        if isinstance(mask := batch.get("attention_mask"), torch.Tensor):
            mask[-1, length - missing :] = 0
    return {**batch, "labels": labels}


_MAKERS: dict[str, Callable[[BatchMaker, int], Batch]] = {
    "text": _text,
    "text_to_text": _text_to_text,
    "image": _image,
    "detection": _detection,
    "video": _video,
    "series": _series,
    "audio": _audio,
    "audio_to_text": _audio,
    "image_text": _image_text,
}


def with_decoder_inputs(batch: dict[str, Any], model: Any) -> dict[str, Any]:
    """As DataCollatorForSeq2Seq adds them: with label smoothing the Trainer takes the labels away that the model would shift itself."""
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if prepare is None or "labels" not in batch or "decoder_input_ids" in batch:
        return batch
    return {**batch, "decoder_input_ids": prepare(labels=batch["labels"])}


_LAYOUT = frozenset({"position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""What says where samples begin in a row of several; rows of their own need none of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unpadded:
    collated: Callable[[int], dict[str, Any]]

    def __call__(self, count: int) -> dict[str, Any]:
        batch = self.collated(count)
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[0] == 1 and ids.shape[1] % count == 0 and _LAYOUT & batch.keys():
            shape = tuple(ids.shape)
            kept = {name: value for name, value in batch.items() if name not in _LAYOUT}
            batch = {name: value.view(count, -1) if _is_row(value, shape) else value for name, value in kept.items()}
            batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))  # TRL counts its tokens by one or the other
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            batch["attention_mask"] = torch.ones_like(mask)
        return batch


def _is_row(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape
