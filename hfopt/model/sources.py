"""What a model's name stands for: its configuration, wherever it is found (never the weights), and the head it trains with.

A folder, a config.json, the bundled table, the local Hub cache and the Hub are asked in that order. What was tried is remembered, so that
an unknown model ends in one message that says it, and proposes the known model it was likely made from: a fine-tuned model has its
architecture, so `--like` plans with that.

The head is that of the task the user names, or of the config's `architectures`, or the usual one for its kind. transformers' own tables
(one per auto class: model type → class name) say which heads a model type has.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.errors import UnknownModelError, WorkloadError
from hfopt.model.known_models import Architecture, find, find_under_any_owner, likeliest, near_names, same_numbers
from hfopt.schema import Assumption, ModelSpec, Task

_HUB_TIMEOUT_S = 5
TABLE, HUB_CACHE, HUB = "bundled table", "Hub cache", "Hub"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSource:
    """The fields of a config.json, and where they were found."""

    name: str
    fields: Mapping[str, Any]
    where: str
    note: str | None = None  # said when the name was not the very one
    packing: str | None = None  # how its weights are packed, where that is not modelled
    taken_for: str | None = None  # the known model whose fields these are, where the name alone says so
    folder: Path | None = None  # where it lies, with its remote code if the config refers to any

    @property
    def has_checkpoint(self) -> bool:
        """Weights exist beside this config, here or on the Hub."""
        if self.folder is None or self.where in (HUB, HUB_CACHE):
            return True
        return any(self.folder.glob("*.safetensors")) or any(self.folder.glob("*.bin"))


_REFERENCE = re.compile(r"^(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)$")


def is_reference(name: str) -> bool:
    """Code of the user's own: `file.py:factory` or `package.module:factory`."""
    return _REFERENCE.match(name) is not None


def stated_model(model: ModelSpec) -> str:
    """The model's name, or the one it is like; refused where neither is stated, and code that may not be run or is not there."""
    name = model.name or model.like
    if not name:
        raise WorkloadError(
            "which model is trained is not stated",
            hint="give --model (a hub id, a folder or a config.json), or model_name_or_path in the YAML; "
            "--model-from FILE reads it from another YAML",
        )
    code = _REFERENCE.match(name)
    if code is not None and not model.trust_remote_code:
        raise WorkloadError(
            f"{name} is code, which is not run unasked", hint="set trust_remote_code: true in the YAML, or give --trust-remote-code"
        )
    if code is not None and code["module"].endswith(".py") and not Path(code["module"]).expanduser().is_file():
        raise WorkloadError(f"{code['module']} cannot be imported: there is no such file")
    return name


def source_of(model: ModelSpec) -> ConfigSource:
    """The configuration of the model that is stated: a published one, or a new one of the type and the sizes that the file gives."""
    if model.beyond is not None:
        raise WorkloadError(f"not planned: {model.beyond}", hint=f"the model alone: hfopt estimate {shlex.quote(model.name or 'MODEL')}")
    made = model.overrides.get("model_type")
    if model.name is None and model.like is None and isinstance(made, str):
        note = f"no checkpoint is named: a new {made} of the sizes in the file is planned"
        return ConfigSource(name=f"a new {made}", fields={"model_type": made}, where="the file", note=note)
    return find_config(stated_model(model), like=model.like)


def find_config(name: str, *, like: str | None = None) -> ConfigSource:
    """The configuration of a model by folder, path of a config.json, or hub id; where none is found, that of the model it is `like`."""
    try:
        return _own_config(name)
    except UnknownModelError:
        if like is not None:
            known = _own_config(like)
            return replace(known, name=name, note=f"{name} is taken for {known.name} (--like): its config was not found")
        twin = None if Path(name).expanduser().exists() else _re_upload(name)  # a folder that is here has no config of its own
        if twin is None:
            raise
        return twin


def _own_config(name: str) -> ConfigSource:
    here = find_here(name)
    if here is not None:
        return here
    tried = ["no such folder or file", "not in the bundled table"]
    if _looks_like_a_path(name):
        raise _unknown(name, tried)
    cached = _cached_on_disk(name)
    if cached is not None:
        return _from_file(cached, name, where=HUB_CACHE)
    tried.append("not in the Hub cache of this machine")
    return _from_hub(name, tried)


def find_here(name: str) -> ConfigSource | None:
    """The same where it is at hand: a folder, a file, the bundled table. Nobody else is asked."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_file(path / "config.json", name)
    if path.is_file() or name.endswith(".json"):
        return _from_file(path, name)
    entry = find(name)
    return ConfigSource(name=entry.hub_id, fields=entry.config, where=TABLE) if entry is not None else None


_PACKED = re.compile(r"[-_.](unsloth[-_.])?(bnb[-_.][48]bit|awq|gptq|aqlm|gguf|eetq|hqq|int[48]|w[48]a16|fp8)([-_.].*)?$", re.IGNORECASE)


def _re_upload(name: str) -> ConfigSource | None:
    """Only when the Hub cannot say better: the same name under another owner is the same architecture, packed or not, and that is said.

    A folder that is not here, on the machine that trains, is known by its own name, or by the one that the Hub's cache gives it.
    """
    cached = re.search(r"(?:^|[/\\])models--([\w.-]+)--([\w.-]+?)(?:[/\\]|$)", name)
    named = "/".join(cached.groups()) if cached else "/".join(["here", *re.split(r"[/\\]", name.rstrip("/\\"))][-2:])
    packing = _PACKED.search(named)
    bare = named if packing is None else named[: packing.start()]
    entry = find_under_any_owner(bare) or (None if packing is None else _packed_of(bare))
    if entry is None:
        return None
    note = f"{name} is not known here; it is taken for {entry.hub_id} by its name"
    packed = None if packing is None or packing[2].lower().startswith("bnb") else packing[2].upper()
    if packed is not None:
        note += f"; how {packed} packs its weights is not modelled: they are planned in 16 bits, which take more"
    return ConfigSource(name=name, fields=entry.config, where=TABLE, note=note, taken_for=entry.hub_id, packing=packed)


def _packed_of(bare: str) -> Architecture | None:
    """What says how it is packed was made from a published model: the one of that family, version and size."""
    likely = likeliest(bare)
    return None if likely is None else find(likely.hub_id)


def _from_file(path: Path, name: str, where: str | None = None) -> ConfigSource:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        likely = likeliest(name)
        hint = likely.sentence if likely else "a model is a folder with a config.json (weights are not needed), or a hub id"
        raise UnknownModelError(f"{path.parent} holds no config.json", hint=hint) from None
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{path} cannot be read as a model's config.json: {error}") from None
    if not isinstance(fields, dict):
        raise WorkloadError(f"{path} is not a model's config.json: it holds a {type(fields).__name__}, not an object")
    return ConfigSource(name=name, fields=fields, where=where or str(path), folder=path.parent)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name


def _cached_on_disk(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _from_hub(name: str, tried: list[str]) -> ConfigSource:
    from urllib.error import HTTPError

    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise _unknown(name, [*tried, "the Hub was not asked: offline mode is on"])
    try:
        _ask_hub(name)
        path = hf_hub_download(name, "config.json", etag_timeout=_HUB_TIMEOUT_S)
    except HFValidationError:
        raise _unknown(name, [*tried, "not a valid hub id"]) from None
    except HTTPError as error:
        error.close()
        reason = {401: "no such model, or it needs a login", 403: "its licence must be accepted first", 404: "no such model"}
        raise _unknown(
            name, [*tried, f"the Hub answered {error.code}: {reason.get(error.code, 'it could not serve the config')}"]
        ) from None
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise _unknown(name, [*tried, f"the Hub could not be reached ({type(error).__name__})"]) from None
    return _from_file(Path(path), name, where=HUB)


def _ask_hub(name: str) -> None:
    """One question with a short limit: the Hub's own client asks five times, half a minute long, where there is no network."""
    from urllib.request import Request, urlopen

    from huggingface_hub import get_token, hf_hub_url

    url, token = hf_hub_url(name, "config.json"), get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urlopen(Request(url, method="HEAD", headers=headers), timeout=_HUB_TIMEOUT_S):
        pass


def _unknown(name: str, tried: list[str]) -> UnknownModelError:
    likely = likeliest(name)
    if likely is not None:
        return UnknownModelError(f"unknown model {name!r}: {'; '.join(tried)}", hint=likely.sentence)
    near = [other for other in near_names(name) if same_numbers(name, other)]
    meant = f". Did you mean {' or '.join(near)}?" if near else ""
    return UnknownModelError(
        f"unknown model {name!r}: {'; '.join(tried)}{meant}",
        hint="put the model's config.json (no weights needed) into a folder and give that folder as the model; "
        "a fine-tuned model has the architecture of the one it was made from: --like ID plans with that one",
    )


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
_BY_MASKS = {
    "mask2former": ("Mask2FormerForUniversalSegmentation",),
    "maskformer": ("MaskFormerForInstanceSegmentation",),
    "eomt": ("EomtForUniversalSegmentation",),
}
"""Segmentation by a mask and a class of each object stands in tables of its own. OneFormer also reads a text, which is not made here."""
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
    if model_type in _BY_MASKS:
        found["semantic_segmentation"] = _BY_MASKS[model_type]
    if "embedding" in found and model_type in CONTRASTIVE:
        found["image_text"] = found["embedding"]
    return found


def task_of_class(class_name: str) -> Task:
    """The task a model class is for, by transformers' tables; 'custom' for a class they do not name."""
    from transformers.models.auto import modeling_auto

    if any(class_name in classes for classes in _TIME_SERIES.values()):
        return "time_series"
    if any(class_name in classes for classes in _BY_MASKS.values()):
        return "semantic_segmentation"
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
