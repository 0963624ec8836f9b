"""How long, wide and tall a sample is: what the YAML says, checked against what the model can take, else the usual size, said so.

Limits: a text is at most as long as the model's position table (models with relative or no positions have none); an image is a size the
patches divide; Whisper's window is always 30 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfopt.errors import WorkloadError
from hfopt.model.batch import OBJECTS, detection_image, lengths
from hfopt.model.vision_language import WORDS, ImageTextSample, image_text_sample
from hfopt.schema import Assumption, BatchShape, DataSpec, Task

TEXT_LENGTH = 512
SFT_LENGTH = 1024  # trl's default max_length
TARGET_LENGTH = 128
AUDIO_SECONDS = 10.0
VIDEO_FRAMES = 16
TRANSCRIPT_TOKENS_PER_SECOND = 4  # CTC and Whisper labels; spoken English is 2-4 words, about 15 characters, a second
SAMPLE_RATE = 16_000
_NO_POSITION_LIMIT = frozenset({"t5", "mt5", "umt5", "longt5", "bloom", "mpt", "xlnet", "transfo-xl", "rwkv", "mamba", "mamba2"})
_POSITIONS_AFTER_PADDING = frozenset(
    {"roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "xlm-roberta-xl", "data2vec-text", "esm"}
)
"""RoBERTa's kin count positions from pad_token_id + 1: a table of 514 takes 512 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedSample:
    shape: BatchShape
    tokens: int | None  # per sample
    assumed: tuple[Assumption, ...] = ()  # each size, as stated or guessed
    sample: ImageTextSample | None = None  # as the model's processor makes it


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a batch's shape depends on besides the config: files of the processor, and the inputs of `forward`."""

    folder: Path | None = None
    accepts: frozenset[str] = frozenset()


def size_batch(
    config: Any, main_input: str, task: Task, data: DataSpec, trainer: str = "Trainer", at: Reading | None = None
) -> SizedSample:
    """The shape of a batch for this model and task."""
    at = at or Reading()
    if task in ("ctc", "audio_classification", "speech_seq2seq"):
        return _audio(config, main_input, task, data)
    if task in ("image_classification", "semantic_segmentation"):
        return _image(config, task, data, masked="mask_labels" in at.accepts)
    if task == "object_detection":
        return _detection(config, data, at)
    if task == "video_classification":
        return _video(config, data)
    if task == "time_series":
        past, future = lengths(config)
        return SizedSample(shape=BatchShape(kind="series", length=past, target_length=future, padded=False), tokens=None)
    if task == "image_text" and _without_placeholders(config):
        return _image_text(config, main_input, data)
    if task == "image_text" and data.images_per_sample != 0:
        return _with_placeholders(config, data, at)
    return _text(config, task, data, trainer)


def position_limit(config: Any) -> int | None:
    """How many tokens the model has positions for; None: no limit of its own."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text.model_type in _NO_POSITION_LIMIT or getattr(text, "position_biased_input", True) is False or getattr(text, "alibi", False):
        return None
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    if text.model_type in _POSITIONS_AFTER_PADDING:
        return limit - (getattr(text, "pad_token_id", None) or 1) - 1
    return limit


def _checked_length(config: Any, length: int, what: str) -> int:
    if length < 1:
        raise WorkloadError(f"{what} of {length} tokens cannot be made", hint="the shortest is 1")
    limit = position_limit(config)
    if limit is not None and length > limit and not _rotary(config):
        raise WorkloadError(
            f"{what} of {length} tokens is over the model's {limit} positions",
            hint=f"use at most {limit} tokens, or raise max_position_embeddings in the model's config if its positions are to be extended",
        )
    return length


def _rotary(config: Any) -> bool:
    """Positions that are computed go on beyond the longest the model was trained with; a table of them ends."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(getattr(text, name, None) for name in ("rope_parameters", "rope_theta", "rotary_emb_base", "rotary_dim"))


def _text(config: Any, task: Task, data: DataSpec, trainer: str) -> SizedSample:
    length = data.max_length
    if length is not None and data.target_follows and data.max_target_length is not None and not config.is_encoder_decoder:
        length += data.max_target_length  # a decoder alone reads the source and its target in one sequence
    if length is None:
        length = SFT_LENGTH if trainer not in ("Trainer", "Seq2SeqTrainer") else TEXT_LENGTH
        length = min(length, position_limit(config) or length)
    length = _checked_length(config, length, "a text")
    assumed = [*data.assumed, _length_assumed(length, data, position_limit(config))]
    if task == "seq2seq_lm" or (config.is_encoder_decoder and task in ("masked_lm", "causal_lm")):
        target = data.max_target_length
        if target is None:
            target = min(TARGET_LENGTH, length)
        target = _checked_length(config, target, "a target")
        assumed.append(_target_assumed(target, data))
        shape = BatchShape(kind="text_to_text", length=length, target_length=target)
        return SizedSample(shape=shape, tokens=length + target, assumed=tuple(assumed))
    tokens = 2 * length if task == "embedding" else length
    return SizedSample(shape=BatchShape(kind="text", length=length, padded=not data.packing), tokens=tokens, assumed=tuple(assumed))


def _length_assumed(length: int, data: DataSpec, limit: int | None) -> Assumption:
    packed = (", packed" if data.packing else "") + (
        f", over the model's {limit} positions" if limit is not None and length > limit else ""
    )
    return Assumption(what="length", value=f"{length} tokens{packed}", guessed=data.max_length is None, settle="--seq-len")


def _target_assumed(length: int, data: DataSpec) -> Assumption:
    return Assumption(what="target length", value=f"{length} tokens", guessed=data.max_target_length is None, settle="max_target_length")


def _image_assumed(side: int, *, guessed: bool) -> Assumption:
    return Assumption(what="image", value=f"{side} × {side} pixels", guessed=guessed, settle="image_size")


def _image(config: Any, task: Task, data: DataSpec, *, masked: bool) -> SizedSample:
    stated = data.image_size or _first(getattr(config, "image_size", None))
    size = (512 if task == "semantic_segmentation" else 224) if stated is None else stated
    if size < 1:
        raise WorkloadError(f"an image of {size} pixels cannot be made")
    _check_image(config, size)
    return SizedSample(
        shape=BatchShape(kind="image", height=size, width=size, channels=config_channels(config), padded=False),
        tokens=None,
        assumed=(
            _image_assumed(size, guessed=stated is None),
            *((Assumption(what="objects", value=f"{OBJECTS} masks an image", guessed=True),) if masked else ()),
        ),
    )


def _check_image(config: Any, size: int) -> None:
    """A model with patches takes at least one."""
    patch, own = _first(getattr(config, "patch_size", None)), _first(getattr(config, "image_size", None))
    if patch is not None and size < patch:
        hint = None if own is None else f"the model's own image_size is {own}"
        raise WorkloadError(f"an image of {size} × {size} pixels holds no patch of {patch} × {patch}", hint=hint)


def _detection(config: Any, data: DataSpec, at: Reading) -> SizedSample:
    image = detection_image(config, data, at.folder)
    masked = image.masked and "pixel_mask" in at.accepts
    shape = BatchShape(kind="detection", height=image.height, width=image.width, channels=config_channels(config), padded=masked)
    return SizedSample(shape=shape, tokens=None, assumed=image.assumed)


def _video(config: Any, data: DataSpec) -> SizedSample:
    """Frames and sides are the model's own: its positions are a table."""
    stated = data.frames or _first(getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None))
    frames = VIDEO_FRAMES if stated is None else stated
    side = data.image_size or _first(getattr(config, "image_size", None)) or _first(getattr(config, "crop_size", None)) or 224
    if frames < 1 or side < 1:
        raise WorkloadError(f"a video of {frames} frames of {side} pixels cannot be made")
    shape = BatchShape(kind="video", frames=frames, height=side, width=side, channels=config_channels(config), padded=False)
    clip = Assumption(what="video", value=f"{frames} frames of {side} × {side} pixels", guessed=stated is None, settle="num_frames")
    return SizedSample(shape=shape, tokens=None, assumed=(clip,))


def config_channels(config: Any) -> int:
    return getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3


def _first(size: Any) -> int | None:
    first = size[0] if isinstance(size, (list, tuple)) else size
    return None if first is None else int(first)


def _audio(config: Any, main_input: str, task: Task, data: DataSpec) -> SizedSample:
    seconds, guessed = data.audio_seconds, False
    if config.model_type == "whisper":
        seconds = 2 * config.max_source_positions / 100  # a frame each 10 ms; the encoder halves them
    elif seconds is None:
        seconds, guessed = AUDIO_SECONDS, True
    if seconds <= 0:
        raise WorkloadError(f"audio of {seconds:g} s cannot be made")
    assumed = [Assumption(what="audio", value=f"{seconds:g} s", guessed=guessed, settle="max_duration_in_seconds")]
    samples = round(seconds * SAMPLE_RATE)
    height, width = _frames(config, main_input, seconds)
    target = None
    if task != "audio_classification":
        rate = TRANSCRIPT_TOKENS_PER_SECOND * (4 if task == "ctc" else 1)  # CTC labels are characters
        target = data.max_target_length or max(1, round(rate * seconds))
        limit = getattr(config, "max_target_positions", None)
        if limit is not None and target > limit:
            raise WorkloadError(
                f"a transcript of {target} tokens is over the model's {limit} target positions", hint=f"use at most {limit}"
            )
        assumed.append(_target_assumed(target, data))
    shape = BatchShape(
        kind="audio_to_text" if task == "speech_seq2seq" else "audio",
        audio_samples=samples,
        height=height,
        width=width,
        target_length=target,
    )
    return SizedSample(shape=shape, tokens=None, assumed=tuple(assumed))


def _frames(config: Any, main_input: str, seconds: float) -> tuple[int | None, int | None]:
    """Rows and columns of the spectrogram, or (None, None) for raw samples."""
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None)
    if config.model_type == "whisper":
        return config.num_mel_bins, 2 * config.max_source_positions
    if config.model_type == "audio-spectrogram-transformer":
        return config.max_length, config.num_mel_bins
    if main_input == "input_features" and bins:
        step_s = 0.02 if config.model_type == "wav2vec2-bert" else 0.01
        return round(seconds / step_s), getattr(config, "input_feat_per_channel", None) or bins
    if main_input == "input_features" and getattr(config, "input_feat_per_channel", None):
        return round(seconds / 0.01), config.input_feat_per_channel
    return None, None


def _without_placeholders(config: Any) -> bool:
    """Image and text meet in a contrastive loss, or the text is the target alone."""
    from hfopt.model.sources import CONTRASTIVE

    return config.model_type in CONTRASTIVE or config.model_type == "vision-encoder-decoder"


def _with_placeholders(config: Any, data: DataSpec, at: Reading) -> SizedSample:
    sample = image_text_sample(config, data, at.folder, at.accepts)
    length = data.max_length
    if length is None:
        length = sample.image_tokens + WORDS
        length = min(length, position_limit(config) or length)
    if length <= sample.image_tokens:
        count = "an image" if sample.images == 1 else f"{sample.images} images"
        raise WorkloadError(
            f"{count} of {sample.height} × {sample.width} pixels take {sample.image_tokens} tokens, which a length of {length} cannot hold",
            hint="raise max_length, or state smaller images (image_size, max_pixels) or fewer of them",
        )
    length = _checked_length(config, length, "a text with its images")
    shape = BatchShape(kind="image_text", length=length, height=sample.height, width=sample.width, channels=3, padded=not data.packing)
    assumed = (*data.assumed, _length_assumed(length, data, position_limit(config)), *sample.assumed)
    return SizedSample(shape=shape, tokens=length, assumed=assumed, sample=sample)


def _image_text(config: Any, main_input: str, data: DataSpec) -> SizedSample:
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None)
    stated = data.image_size or _first(getattr(vision, "image_size", None))
    size = stated or 224
    limit = position_limit(config)
    length = data.max_length
    if length is None:
        length = min(TEXT_LENGTH, limit or TEXT_LENGTH)
    length = _checked_length(config, length, "a text")
    channels = getattr(vision, "num_channels", None) or 3
    shape = BatchShape(kind="image_text", length=length, height=size, width=size, channels=channels)
    assumed = (_length_assumed(length, data, limit), _image_assumed(size, guessed=stated is None))
    return SizedSample(shape=shape, tokens=length, assumed=assumed)
