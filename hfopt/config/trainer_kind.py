"""Which Trainer reads a file, and which task it trains: what it names, else what its keys, dataset, labels or loss say.

TRL's scripts take the arguments of several classes from one flat file, so that a short file may have no key of a single trainer's own. It
is TRL's when its keys are all known to TRL's parser, one of them is none of TrainingArguments, and the model is no encoder by its name.

An encoder's checkpoint says only that it was trained as a masked language model, which is seldom what a config fine-tunes. The labels of
public datasets are those of their cards on the Hub.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.config.lookup import Facts, is_off, model_name
from hfopt.config.other_tools import is_swift, is_unsloth
from hfopt.config.trained_parts import has_images, is_tuned_on_text
from hfopt.config.training_arguments import trl_keys
from hfopt.facts.training_keys import installed
from hfopt.schema import GENERATING, Task, TrainerKind

_NAMED: Mapping[str, TrainerKind] = {
    "grpo": "GRPO",
    "rloo": "RLOO",
    "orpo": "ORPO",
    "simpo": "CPO",
    "cpo": "CPO",
    "dpo": "DPO",
    "kto": "KTO",
    "reward": "Reward",
    "sft": "SFT",
}
_STATED_BY = (
    *(
        "stage",
        "rlhf_type",
        "rl",
        "method",
        "trainer_type",
        "trainer_class",
        "trainer",
        "training_type",
        "algorithm",
        "algo",
        "rl_algorithm",
    ),
    *("training_method", "train_method", "training_stage", "task"),
)
_OWN_KEYS: tuple[tuple[TrainerKind, tuple[str, ...]], ...] = (
    ("RLOO", ("rloo_k", "normalize_advantages", "reward_clip_range")),
    ("GRPO", ("num_generations", "reward_funcs", "steps_per_generation", "scale_rewards", "grpo_epochs", "num_samples_per_prompt")),
    ("KTO", ("desirable_weight", "undesirable_weight")),
    ("Reward", ("center_rewards_coefficient",)),
    ("CPO", ("gamma_beta_ratio", "simpo_gamma", "cpo_alpha")),
    (
        "DPO",
        (
            *("rpo_alpha", "f_divergence_type", "precompute_ref_log_probs", "ref_model_sync_steps", "pref_beta", "reference_free"),
            *("dpo_beta", "dpo_loss_type", "max_prompt_length"),
        ),
    ),
)
"""Keys that only one trainer's config has (trl 0.12 to 1.16; gamma_beta_ratio: the scripts of the SimPO paper; dpo_*: scripts' own)."""
_REFERENCES = ("ref_model", "ref_model_name_or_path", "ref_model_name", "ref_model_path", "reference_model")
_MORE_THAN_SAMPLES: frozenset[TrainerKind] = frozenset({"DPO", "KTO", "ORPO", "CPO", "GRPO", "RLOO"})
"""Trainers whose step holds more than the sample: a path that names one counts, where the file says nothing else."""
_LOSSES: Mapping[str, TrainerKind] = {
    **dict.fromkeys(("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "apo_zero"), "DPO"),
    **dict.fromkeys(("aot_unpaired", "aot_pair", "apo_down", "discopop", "sigmoid_norm"), "DPO"),
    **dict.fromkeys(("simpo", "alphapo"), "CPO"),
    **dict.fromkeys(("kto", "apo_zero_unpaired"), "KTO"),
    **dict.fromkeys(("grpo", "dapo", "dr_grpo", "bnpo", "cispo"), "GRPO"),
}
"""Values of loss_type, by the trainer that has them."""
_SFT_KEYS = (
    *("dataset_mixer", "dataset_mixture", "dataset_text_field", "packing", "use_peft", "completion_only_loss", "dataset_num_proc"),
    *("assistant_only_loss", "padding_free", "packing_strategy"),
)
_REWARD_WORDS = frozenset({"reward", "rm", "orm"})  # in the name of a file
_DATA = ("dataset_name", "datasets", "dataset_mixer", "dataset_mixture")
_ENCODERS = re.compile(
    r"bert|electra|xlnet|(^|[-_/])m?t5|bart|pegasus|marian|opus-mt|(^|[-_/])vit|swin|clip|whisper|wav2vec|hubert|mpnet|minilm|layoutlm"
    r"|longformer|(^|[-_/])(e5|bge|gte)-|sentence-transformers|resnet|convnext|detr|nllb|m2m100",
    re.IGNORECASE,
)
"""Words in the names of models that are no causal language models."""


def trainer_kind(facts: Facts, path: str, data: Mapping[Any, Any]) -> TrainerKind:
    """`data` is the whole file."""
    stage = (facts.text(*_STATED_BY) or "").lower()
    for word, trainer in _NAMED.items():
        if re.search(rf"(?:^|[_\W]){word}|{word}(?:$|[_\W]|trainer)", stage):
            return trainer
    if stage in ("rm", "pt", "ppo") and (facts.has("finetuning_type", "cutoff_len", "template") or is_swift(facts)):
        return "Reward" if stage == "rm" else "SFT"
    if is_swift(facts):
        return "GRPO" if facts.has("reward_funcs", "num_generations") else "SFT"
    if (section := _by_section(data)) is not None:
        return section
    own = next((trainer for trainer, keys in _OWN_KEYS if facts.has(*keys)), None)
    if facts.has("group_size") and facts.has("clip_epsilon", "clip_eps", "clip_ratio", "kl_coef", "kl_beta"):
        own = "GRPO"  # alone it is how quantized weights are cut
    preference = own or _by_loss(facts)
    by_path = _by_path(path)
    if preference == "DPO" and by_path == "GRPO" and not names_trainer(facts, "DPO"):
        return by_path
    if preference is not None:
        return by_path if preference in ("DPO", "GRPO") and by_path in ("ORPO", "CPO", "RLOO", "KTO") else preference
    name = model_name(facts)
    if facts.has(*_SFT_KEYS) and (name is None or _ENCODERS.search(name) is None):
        return by_path or "SFT"
    if facts.has("finetuning_type") or (facts.has("cutoff_len") and facts.has("template")):
        return "SFT"
    if is_unsloth(facts):
        return by_path or "SFT"
    if facts.has("predict_with_generate", "generation_max_length", "sortish_sampler", "generation_num_beams"):
        return "Seq2SeqTrainer"
    if facts.text(*_REFERENCES) is not None:
        return by_path if by_path in _MORE_THAN_SAMPLES else "DPO"
    near = _by_path("/".join(Path(path).parts[-2:]))  # a whole project may be named after what one of its files does
    if near in _MORE_THAN_SAMPLES and name is not None and _is_causal(name):
        return near
    if name is not None and _is_causal(name) and _REWARD_WORDS & set(re.split(r"[\W_]+", Path(path).stem.lower())):
        return "Reward"
    return (by_path or "SFT") if _of_a_trl_script(facts, data, said=by_path is not None) else "Trainer"


def names_trainer(facts: Facts, trainer: TrainerKind) -> bool:
    """The file itself says which: by name, by a key that only its config has, or, of a plain Trainer, by saying nothing of another."""
    if trainer in ("Trainer", "Seq2SeqTrainer"):
        return True
    stage = (facts.text(*_STATED_BY) or "").lower()
    named = any(word in stage and kind == trainer for word, kind in _NAMED.items())
    own = any(kind == trainer and facts.has(*(key for key in keys if key != "max_prompt_length")) for kind, keys in _OWN_KEYS)
    return named or own or _LOSSES.get(str(facts.get("loss_type"))) == trainer


def _by_section(data: Mapping[Any, Any]) -> TrainerKind | None:
    """A section of the method's own (`training: {grpo: {group_size: 4}}`), where there is one alone."""
    inner = [value for value in data.values() if isinstance(value, Mapping)]
    sections = [
        key.lower()
        for level in (data, *inner)
        for key, value in level.items()
        if isinstance(key, str) and isinstance(value, Mapping) and not is_off(value)
    ]
    words = {word for key in sections for word in re.split(r"[\W_]+", key)}
    found = {trainer for word, trainer in _NAMED.items() if word in words and word != "reward"}  # `reward:` is a part of GRPO's files
    return found.pop() if len(found) == 1 else None


def _by_path(path: str) -> TrainerKind | None:
    """By the file's own name first, then by the folders around it, the nearest first; `__` stands for a folder in flattened names."""
    for part in reversed(re.split(r"[/\\]|__", path.lower())):
        words = set(re.split(r"[\W_]+", part))
        if (found := next((trainer for word, trainer in _NAMED.items() if word in words), None)) is not None:
            return found
    return None


def _by_loss(facts: Facts) -> TrainerKind | None:
    """A loss by its name, or a `beta` beside what only a preference job has."""
    named = facts.get("loss_type")
    named = named[0] if isinstance(named, list) and named else named
    of_the_loss = _LOSSES.get(named) if isinstance(named, str) else None
    if of_the_loss is not None and facts.has("beta", *_DATA):
        return of_the_loss
    return "DPO" if facts.has("beta") and facts.has("max_prompt_length", "max_length", "loss_type", *_DATA) else None


def _of_a_trl_script(facts: Facts, data: Mapping[Any, Any], *, said: bool) -> bool:
    """Every key is one that TRL's parser takes; `said`: the path names a trainer, so that the length need not be there."""
    keys = {key for key in data if isinstance(key, str)}
    known = trl_keys("script") | trl_keys("SFT") | installed().fields.keys()
    name = facts.text("model_name_or_path")
    if not facts.has(*_DATA) or name is None or not keys <= known or not (said or "max_length" in keys):
        return False
    return _is_causal(name)


def _is_causal(name: str) -> bool:
    config = Path(name).expanduser() / "config.json"
    if config.is_file():
        try:
            architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or ["CausalLM"]
        except (OSError, ValueError, AttributeError):
            return True
        return any("CausalLM" in str(one) or "LMHead" in str(one) for one in architectures)
    return _ENCODERS.search(name) is None


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
_GENERATING: tuple[
    tuple[re.Pattern[str], Task], ...
] = (  # X of XForConditionalGeneration; of others the checkpoint's config says what it is
    (re.compile(r"u?m?t5|longt5|m?bart|led|pegasus|marian|m2m|nllb|prophetnet|blenderbot|switch"), "seq2seq_lm"),
    (re.compile(r"whisper|speech|moonshine"), "speech_seq2seq"),
)
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
_LABELLED_TASKS = ("sequence_classification", "token_classification", "image_classification", "audio_classification")
_TOKEN_LABELS = {"conll2003": 9, "conllpp": 9, "wnut_17": 13, "wikiann": 7}
_TEXT_ENCODER = re.compile(r"bert|electra|xlnet|mpnet|minilm|longformer|big-?bird|ernie|funnel|roformer|camembert|xlm-r", re.IGNORECASE)
_OF_KEYS: tuple[tuple[Task, tuple[str, ...]], ...] = (  # options of transformers' own example scripts
    ("question_answering", ("doc_stride", "version_2_with_negative", "n_best_size")),
    ("token_classification", ("label_all_tokens", "return_entity_level_metrics")),
    ("masked_lm", ("mlm_probability", "line_by_line")),
)
_CLASS_LOSSES = frozenset({"bce", "focal", "focal_loss", "bce_with_logits", "weighted_ce"})
_COMPARING = re.compile(
    r"negativesranking|mnrl|cosinesimilarityloss|cosentloss|angleloss|tripletloss|infonce|onlinecontrastive|gistembed", re.IGNORECASE
)
"""Losses of sentence-transformers, by their names."""


def read_task(facts: Facts, trainer: TrainerKind, *, is_factory: bool) -> tuple[Task | None, int | None]:
    """The task and the number of labels, as far as the file says."""
    labels = facts.whole("num_labels", "num_classes", "n_classes", "n_labels")
    task, usual = _stated(facts, trainer, is_factory=is_factory)
    if task is None and trainer in ("Trainer", "Seq2SeqTrainer") and labels is None:
        task, usual = ("causal_lm", None) if is_tuned_on_text(facts) else _gathered(facts)
    if labels is None and usual is None and (_is_text_encoder(facts) or task in _LABELLED_TASKS):
        usual = _listed_labels(facts)
    return task, labels or usual


def _stated(facts: Facts, trainer: TrainerKind, *, is_factory: bool) -> tuple[Task | None, int | None]:
    if trainer == "Reward":  # LLaMA-Factory puts a value head on a causal model
        return ("causal_lm", None) if is_factory else ("sequence_classification", 1)
    for value in (facts.text("task_name"), facts.text("task"), facts.text("task_type"), facts.text("pipeline_tag")):
        if value is not None and value.lower().replace("-", "") in _GLUE_LABELS:
            return "sequence_classification", _GLUE_LABELS[value.lower().replace("-", "")]
        if value is not None and (task := _task_of(value)) is not None:
            sees = task == "causal_lm" and trainer not in GENERATING and has_images(facts, by_name=True)
            return "image_text" if sees else task, None  # peft calls every model that writes a CAUSAL_LM
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
        return "image_text" if has_images(facts, by_name=trainer not in GENERATING) else "causal_lm", None
    return None, None


def _gathered(facts: Facts) -> tuple[Task | None, int | None]:
    """By the loss, the options of an example script, or the dataset."""
    loss = _first_text(facts, "loss", "loss_type", "loss_function", "loss_fn", "loss_name")
    if _COMPARING.search(loss or facts.text("name", "type", under=("loss", "loss_config")) or "") or facts.has(
        "batch_sampler", "multi_dataset_batch_sampler"
    ):
        return "embedding", None
    if not _is_text_encoder(facts):
        return None, None
    for task, keys in _OF_KEYS:
        if facts.has(*keys):
            return task, None
    mixed = facts.get("dataset_mixer")
    stated = (
        next(iter(mixed), "") if isinstance(mixed, Mapping) else _first_text(facts, "dataset_name", "dataset", "dataset_id", "dataset_path")
    )
    name = str(stated).rsplit("/", 1)[-1].lower()
    known = _LABELLED.get(name)
    if known is None:
        return ("sequence_classification", None) if _tells_classes_apart(facts) else (None, None)
    return known[0], known[1] or _TOKEN_LABELS.get(name)


def _tells_classes_apart(facts: Facts) -> bool:
    """A loss over classes alone, or the name of the run."""
    losses = {str(value).lower() for _, value in facts.all("loss", "loss_type", "loss_fn", "loss_name", "kind")}
    named = " ".join(facts.text(key) or "" for key in ("experiment_family", "experiment_name", "run_name", "project_name", "output_dir"))
    return bool(losses & _CLASS_LOSSES) or "classif" in named.lower()


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
    if (of_class := re.fullmatch(r"(\w+?)forconditionalgeneration", text.lower())) is not None:
        return next((task for words, task in _GENERATING if words.match(of_class[1])), None)
    word = re.sub(r"[^a-z0-9]", "", text.lower().rsplit("modelfor", 1)[-1].rsplit("for", 1)[-1])
    named = _TASKS.get(word) or _TASKS.get(re.sub(r"[^a-z0-9]", "", text.lower()))
    return named or (_TASKS[found[1].lower()] if (found := _OWN_CLASS.fullmatch(text)) is not None else None)


_OWN_CLASS = re.compile(
    r"\w+?For((?:Causal|Masked)LM|Seq2SeqLM|(?:Sequence|Token|Image|Audio|Video)Classification|QuestionAnswering"
    r"|SemanticSegmentation|ObjectDetection)\w+"
)
"""A script's class made from one of transformers': RobertaForSequenceClassificationWithLstm."""


def own_class_notes(facts: Facts) -> tuple[str, ...]:
    """What a script's class adds to the head that its name says is not known here."""
    stated = ((key, one) for key in ("model_class", "architectures", "architecture") for one in _strings(facts.get(key)))
    found = next(((key, one) for key, one in stated if _OWN_CLASS.fullmatch(one)), None)
    return (
        ()
        if found is None
        else (f"{found[0]}: {found[1]} is a class of the script's own: what it adds to the usual head is not in the figures",)
    )
