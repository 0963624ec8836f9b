"""Models whose config brings its own code (`auto_map`): imported only when trusted, as transformers' trust_remote_code does."""

from __future__ import annotations

from typing import Any

from hfopt.errors import WorkloadError
from hfopt.model.heads import Head
from hfopt.model.sources import ConfigSource
from hfopt.schema import Task

_AUTO_CLASSES: dict[str, Task] = {
    "AutoModelForCausalLM": "causal_lm",
    "AutoModelForMaskedLM": "masked_lm",
    "AutoModelForSeq2SeqLM": "seq2seq_lm",
    "AutoModelForSequenceClassification": "sequence_classification",
    "AutoModelForTokenClassification": "token_classification",
    "AutoModelForQuestionAnswering": "question_answering",
    "AutoModelForImageClassification": "image_classification",
    "AutoModelForSemanticSegmentation": "semantic_segmentation",
    "AutoModelForCTC": "ctc",
    "AutoModelForSpeechSeq2Seq": "speech_seq2seq",
    "AutoModelForAudioClassification": "audio_classification",
    "AutoModelForImageTextToText": "image_text",
}


def remote_config(source: ConfigSource, *, trusted: bool) -> Any:
    if not trusted:
        raise WorkloadError(
            f"{source.name} brings its own code ({source.where}), which is not run unasked",
            hint="set trust_remote_code: true in the YAML if you trust it",
        )
    return _load(source, "AutoConfig").from_dict(dict(source.fields))


def remote_head(source: ConfigSource, task: Task | None) -> Head:
    """The class for the task among those the config's auto_map names; the first with a loss when no task is asked."""
    able = {_AUTO_CLASSES[name]: name for name in source.fields["auto_map"] if name in _AUTO_CLASSES}
    chosen = task or next(iter(able), None)
    if chosen is None or chosen not in able:
        raise WorkloadError(
            f"the code of {source.name} has no head for {chosen or 'training'}", hint=f"it has: {', '.join(able) or 'none'}"
        )
    model_class = _load(source, able[chosen])
    return Head(task=chosen, class_name=model_class.__name__, model_class=model_class)


def _load(source: ConfigSource, auto_name: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = source.fields["auto_map"].get(auto_name)
    reference = reference[0] if isinstance(reference, list) else reference
    if not isinstance(reference, str):
        raise WorkloadError(f"the config of {source.name} names no {auto_name} in its auto_map")
    try:
        return get_class_from_dynamic_module(reference, str(source.folder or source.name))
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise WorkloadError(f"the code of {source.name} ({reference}) cannot be loaded: {error}") from error
