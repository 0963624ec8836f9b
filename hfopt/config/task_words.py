"""Which task a config trains: the one it names, else what its dataset, its labels or its loss say of a text encoder.

An encoder's checkpoint says only that it was trained as a masked language model, which is seldom what a config fine-tunes. The labels of
public datasets are those of their cards on the Hub.
"""

from __future__ import annotations

import re
from typing import Any

from hfopt.config.lookup import Facts, model_name
from hfopt.config.trained_parts import has_images
from hfopt.schema import Task, TrainerKind

_GLUE_LABELS = {"cola": 2, "sst2": 2, "mrpc": 2, "qqp": 2, "stsb": 1, "mnli": 3, "qnli": 2, "rte": 2, "wnli": 2}
_TASKS: dict[str, Task] = {
    "causallm": "causal_lm",
    "clm": "causal_lm",
    "textgeneration": "causal_lm",
    "languagemodeling": "causal_lm",
    "sft": "causal_lm",
    "maskedlm": "masked_lm",
    "mlm": "masked_lm",
    "fillmask": "masked_lm",
    "pretraining": "masked_lm",
    "seq2seqlm": "seq2seq_lm",
    "seq2seq": "seq2seq_lm",
    "text2textgeneration": "seq2seq_lm",
    "summarization": "seq2seq_lm",
    "translation": "seq2seq_lm",
    "conditionalgeneration": "seq2seq_lm",
    "sequenceclassification": "sequence_classification",
    "seqcls": "sequence_classification",
    "textclassification": "sequence_classification",
    "sentimentanalysis": "sequence_classification",
    "classification": "sequence_classification",
    "glue": "sequence_classification",
    "tokenclassification": "token_classification",
    "tokencls": "token_classification",
    "ner": "token_classification",
    "questionanswering": "question_answering",
    "qa": "question_answering",
    "questionans": "question_answering",
    "imageclassification": "image_classification",
    "semanticsegmentation": "semantic_segmentation",
    "imagesegmentation": "semantic_segmentation",
    "ctc": "ctc",
    "speechseq2seq": "speech_seq2seq",
    "audioclassification": "audio_classification",
    "embedding": "embedding",
    "featureextraction": "embedding",
    "sentencesimilarity": "embedding",
    "reranker": "sequence_classification",
    "imagetexttotext": "image_text",
    "transcribe": "speech_seq2seq",
    "vision2seq": "image_text",
    "imagetotext": "image_text",
    "visualquestionanswering": "image_text",
    "objectdetection": "object_detection",
    "detection": "object_detection",
    "videoclassification": "video_classification",
    "timeseriesprediction": "time_series",
    "timeseriesforecasting": "time_series",
    "timeseries": "time_series",
    "forecasting": "time_series",
}
_LABELLED: dict[str, tuple[Task, int | None]] = {
    **dict.fromkeys(("squad", "squad_v2", "newsqa", "natural_questions"), ("question_answering", None)),
    **dict.fromkeys(("conll2003", "wnut_17", "wikiann", "conllpp", "ncbi_disease", "bc5cdr"), ("token_classification", None)),
    **dict.fromkeys(("imdb", "sst2", "yelp_polarity", "amazon_polarity", "rotten_tomatoes", "glue"), ("sequence_classification", 2)),
    "ag_news": ("sequence_classification", 4),
    "emotion": ("sequence_classification", 6),
    "yelp_review_full": ("sequence_classification", 5),
    "dbpedia_14": ("sequence_classification", 14),
    "banking77": ("sequence_classification", 77),
    "financial_phrasebank": ("sequence_classification", 3),
}
_TOKEN_LABELS = {"conll2003": 9, "conllpp": 9, "wnut_17": 13, "wikiann": 7}
_TEXT_ENCODER = re.compile(r"bert|electra|xlnet|mpnet|minilm|longformer|big-?bird|ernie|funnel|roformer|camembert|xlm-r", re.IGNORECASE)
_OF_KEYS: tuple[tuple[Task, tuple[str, ...]], ...] = (  # options of transformers' own example scripts
    ("question_answering", ("doc_stride", "version_2_with_negative", "n_best_size")),
    ("token_classification", ("label_all_tokens", "return_entity_level_metrics")),
    ("masked_lm", ("mlm_probability", "line_by_line")),
)
_COMPARING = re.compile(
    r"negativesranking|mnrl|cosinesimilarityloss|cosentloss|angleloss|tripletloss|infonce|onlinecontrastive|gistembed", re.IGNORECASE
)
"""Losses of sentence-transformers, by their names."""


def read_task(facts: Facts, trainer: TrainerKind, *, is_factory: bool) -> tuple[Task | None, int | None]:
    """The task and the number of labels, as far as the file says."""
    labels = facts.whole("num_labels", "num_classes", "n_classes", "n_labels")
    task, usual = _stated(facts, trainer, is_factory=is_factory)
    if task is None and trainer in ("Trainer", "Seq2SeqTrainer") and labels is None:
        task, usual = _gathered(facts)
    if labels is None and usual is None and _is_text_encoder(facts):
        usual = _listed_labels(facts)
    return task, labels or usual


def _stated(facts: Facts, trainer: TrainerKind, *, is_factory: bool) -> tuple[Task | None, int | None]:
    if trainer == "Reward":  # LLaMA-Factory puts a value head on a causal model
        return ("causal_lm", None) if is_factory else ("sequence_classification", 1)
    for value in (facts.text("task_name"), facts.text("task"), facts.text("task_type"), facts.text("pipeline_tag")):
        if value is not None and value.lower().replace("-", "") in _GLUE_LABELS:
            return "sequence_classification", _GLUE_LABELS[value.lower().replace("-", "")]
        if value is not None and (task := _task_of(value)) is not None:
            return task, None
    for value in (
        facts.text("model_class"),
        facts.text("auto_class"),
        facts.text("auto_model_class"),
        facts.text("model_type"),
        facts.text("lora_task_type"),
        *_strings(facts.get("architectures", "architecture")),
    ):
        if value is not None and (task := _task_of(value)) is not None:
            return task, None
    if trainer not in ("Trainer", "Seq2SeqTrainer"):
        return "image_text" if has_images(facts) else "causal_lm", None
    return None, None


def _gathered(facts: Facts) -> tuple[Task | None, int | None]:
    """By the loss, the options of an example script, or the dataset."""
    if _COMPARING.search(_first_text(facts, "loss", "loss_type", "loss_function", "loss_fn", "loss_name")) or facts.has(
        "batch_sampler", "multi_dataset_batch_sampler"
    ):
        return "embedding", None
    if not _is_text_encoder(facts):
        return None, None
    for task, keys in _OF_KEYS:
        if facts.has(*keys):
            return task, None
    name = _first_text(facts, "dataset_name", "dataset", "dataset_id", "dataset_path").rsplit("/", 1)[-1].lower()
    known = _LABELLED.get(name)
    return (None, None) if known is None else (known[0], known[1] or _TOKEN_LABELS.get(name))


def _listed_labels(facts: Facts) -> int | None:
    value = facts.get("labels", "label_list", "label_names", "class_names", "classes", "id2label", "label2id", "label_map")
    return len(value) if isinstance(value, (list, dict)) and len(value) > 1 else None


def _is_text_encoder(facts: Facts) -> bool:
    return _TEXT_ENCODER.search(model_name(facts) or "") is not None


def _first_text(facts: Facts, *names: str) -> str:
    return re.sub(r"[^\w/.-]", "", facts.text(*names) or "").replace("-", "_" if "dataset" in names[0] else "")


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(str(part) for part in value) if isinstance(value, list) else ()


def _task_of(text: str) -> Task | None:
    """'text-classification', 'SEQ_CLS' and 'AutoModelForSequenceClassification' all name a task."""
    word = re.sub(r"[^a-z0-9]", "", text.lower().rsplit("modelfor", 1)[-1].rsplit("for", 1)[-1])
    return _TASKS.get(word) or _TASKS.get(re.sub(r"[^a-z0-9]", "", text.lower()))
