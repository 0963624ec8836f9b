"""Which head a model trains with: the task the user names, or the one its config's `architectures` names, or the usual one for its kind.

transformers' own tables (one per auto class: model type → class name) say which heads a model type has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.errors import WorkloadError
from hfopt.schema import Assumption, Task

_TABLES: dict[Task, str] = {
    "causal_lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "seq2seq_lm": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "masked_lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "sequence_classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token_classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question_answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "image_classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "semantic_segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "object_detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "video_classification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "ctc": "MODEL_FOR_CTC_MAPPING_NAMES",
    "speech_seq2seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "audio_classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "image_text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "embedding": "MODEL_MAPPING_NAMES",
}
_TIME_SERIES = {
    "patchtst": ("PatchTSTForPrediction", "PatchTSTForClassification", "PatchTSTForRegression"),
    "patchtsmixer": ("PatchTSMixerForPrediction", "PatchTSMixerForTimeSeriesClassification", "PatchTSMixerForRegression"),
    "time_series_transformer": ("TimeSeriesTransformerForPrediction",),
    "informer": ("InformerForPrediction",),
    "autoformer": ("AutoformerForPrediction",),
}
"""Forecasting classes stand in no table of transformers' auto classes."""
_USUAL: tuple[Task, ...] = (
    "speech_seq2seq",
    "ctc",
    "time_series",
    "object_detection",
    "video_classification",
    "semantic_segmentation",
    "image_classification",
    "image_text",
    "audio_classification",
    "masked_lm",
    "causal_lm",
    "seq2seq_lm",
    "sequence_classification",
)
"""Tried in this order when the config names no class with a loss. Masked LM stands before causal LM because encoders have both."""

_FULLER: dict[Task, tuple[Task, ...]] = {"causal_lm": ("image_text",), "seq2seq_lm": ("speech_seq2seq", "image_text")}
"""A class that stands in both tables (Gemma 3, Whisper) takes more than text."""
CONTRASTIVE = frozenset({"clip", "siglip", "siglip2", "chinese_clip", "altclip"})
"""Model types whose base class computes the image-text contrastive loss itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    task: Task
    class_name: str
    note: str | None = None  # why another class than the config's
    guessed: bool = False  # nobody named the task
    model_class: Any = None  # the class itself, when it is not one of transformers'

    @property
    def assumption(self) -> Assumption:
        return Assumption(what="head", value=self.class_name, guessed=self.guessed, settle="--task")


def heads_of(model_type: str) -> dict[Task, tuple[str, ...]]:
    """Every task this model type has a class for, in transformers' tables."""
    from transformers.models.auto import modeling_auto

    found: dict[Task, tuple[str, ...]] = {}
    for task, table_name in _TABLES.items():
        entry = getattr(modeling_auto, table_name).get(model_type)
        if entry is not None:
            classes = (entry,) if isinstance(entry, str) else tuple(entry)
            found[task] = tuple(name for name in classes if not name.endswith("WithTeacher"))  # those are for inference, without a loss
    if model_type in _TIME_SERIES:
        found["time_series"] = _TIME_SERIES[model_type]
    if "embedding" in found and model_type in CONTRASTIVE:
        found["image_text"] = found["embedding"]
    return found


def task_of_class(class_name: str) -> Task:
    """The task a model class is for, by transformers' tables; 'custom' for a class they do not name."""
    from transformers.models.auto import modeling_auto

    if any(class_name in classes for classes in _TIME_SERIES.values()):
        return "time_series"
    for task, table_name in _TABLES.items():
        names = getattr(modeling_auto, table_name).values()
        if any(class_name == entry or (not isinstance(entry, str) and class_name in entry) for entry in names):
            return "custom" if task == "embedding" else task
    return "custom"


def choose_head(model_type: str, config: Mapping[str, Any], task: Task | None, trainer: str = "Trainer") -> Head:
    """The class to build. A task the model has no class for is an error that lists what it has."""
    heads = heads_of(model_type)
    named = next(iter(config.get("architectures") or ()), None)
    if task is None and trainer != "Trainer" and trainer != "Seq2SeqTrainer":
        task = "sequence_classification" if trainer == "Reward" else "causal_lm"
    if task is not None:
        if task == "causal_lm" and trainer != "Trainer" and task in heads and named in heads.get("image_text", ()):
            return Head(task=task, class_name=named)  # TRL and LLaMA-Factory load the class the checkpoint names, for text too
        return _for_task(model_type, heads, task, named)
    for candidate, classes in heads.items():
        if (
            named in classes
            and candidate != "embedding"
            and not any(named in heads.get(fuller, ()) for fuller in _FULLER.get(candidate, ()))
        ):
            return Head(task=candidate, class_name=named, guessed=True)
    if not heads:
        raise WorkloadError(f"transformers has no trainable class for model type {model_type!r}")
    if named is not None and named in heads.get("embedding", ()) and not config.get("is_encoder_decoder") and "masked_lm" in heads:
        return Head(task="embedding", class_name=named, guessed=True)
    usual = _usual(model_type, heads, encoder_decoder=bool(config.get("is_encoder_decoder")))
    why = f"the config names {named}, which has no fine-tuning loss" if named else "the config names no class"
    return Head(task=usual, class_name=heads[usual][0], note=f"{why}; {heads[usual][0]} is assumed", guessed=True)


def config_for(model_class: Any, config: Any) -> Any:
    """The language model alone of a vision-language model is made from that part of its config, as transformers' auto classes do it."""
    text = getattr(type(config), "sub_configs", {}).get("text_config")
    return config.get_text_config() if text is not None and getattr(model_class, "config_class", None) is text else config


def labelled(model_type: str, head: Head, labels: int) -> Head:
    """A text model that is given a number of labels is a classifier, whatever its checkpoint was trained as."""
    classes = heads_of(model_type).get("sequence_classification")
    if classes is None or head.task not in ("masked_lm", "causal_lm", "embedding"):
        return head
    note = f"num_labels: {labels} makes it a classifier: {classes[0]} (say --task token_classification or another to choose)"
    return Head(task="sequence_classification", class_name=classes[0], note=note, guessed=True)


def _for_task(model_type: str, heads: dict[Task, tuple[str, ...]], task: Task, named: str | None) -> Head:
    if task == "seq2seq_lm" and "speech_seq2seq" in heads:
        task = "speech_seq2seq"  # Whisper stands in both tables; what it hears is no text
    if task == "causal_lm" and task not in heads and "image_text" in heads:
        task = "image_text"  # what TRL loads for a vision-language model
    classes = heads.get(task)
    if classes is None:
        able = ", ".join(sorted(heads)) or "none"
        raise WorkloadError(f"a {model_type} model has no head for {task}", hint=f"its heads are: {able}")
    return Head(task=task, class_name=named if named in classes else classes[0])


def _usual(model_type: str, heads: dict[Task, tuple[str, ...]], *, encoder_decoder: bool) -> Task:
    order: tuple[Task, ...] = ("speech_seq2seq", "seq2seq_lm", *_USUAL) if encoder_decoder else _USUAL
    found = next((task for task in order if task in heads), None)
    if found is None:
        raise WorkloadError(
            f"no usual task is known for model type {model_type!r}",
            hint=f"name one: {', '.join(sorted(heads))} (--task, or task: in the YAML)",
        )
    return found
