"""What a config says, by name: a fact under any of its names, wherever in the file it stands, and the model among them.

A file may hold several names: the family (`model: bert`), the checkpoint (`model_name: bert-base-uncased`), the run (`model_name: my-run-3`
beside `model: org/checkpoint`). What reads most like a checkpoint counts: a hub id, then a path, then a bare name of a known family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hfopt.config.yaml_document import NodePath, parse, read_bytes, shared_depth
from hfopt.errors import ConfigError


class Facts:
    """All values of a document but those in `left_out` (the profiles not meant) and in sections with `enabled: false`.

    Of one name's values the one nearest to `near` counts.
    """

    def __init__(self, data: dict[str, Any], *, near: NodePath = (), left_out: Sequence[NodePath] = ()) -> None:
        found = [item for item in _flatten(data, ()) if not any(item[0][: len(path)] == path for path in left_out)]
        off = [path for path, value in found if is_off(value)]
        found = [item for item in found if item[0][-1] in OFF_KEYS or not any(item[0][: len(path)] == path for path in off)]
        found.sort(key=lambda item: (-shared_depth(item[0], near), len(item[0])))
        self._by_name: dict[str, list[tuple[NodePath, Any]]] = {}
        self.asked: set[str] = set()  # the names that somebody looked up
        for path, value in found:
            self._by_name.setdefault(path[-1].lower().replace("-", "_"), []).append((path, value))

    def get(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> Any:
        """The first value that is not null under one of the names."""
        return next((value for _, value in self.all(*names, under=under, not_under=not_under) if value is not None), None)

    def all(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> Iterator[tuple[NodePath, Any]]:
        inside, outside = set(under), set(not_under)
        self.asked.update(names)
        for name in names:
            for path, value in self._by_name.get(name, ()):
                parents = {part.lower() for part in path[:-1]}
                if (not inside or parents & inside) and not parents & outside:
                    yield path, value

    def has(self, *names: str) -> bool:
        self.asked.update(names)
        return any(name in self._by_name for name in names)

    def leaves(self) -> Iterator[tuple[NodePath, Any]]:
        """Every value that is no mapping, with its path."""
        return (item for found in self._by_name.values() for item in found if not isinstance(item[1], dict))

    def text(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> str | None:
        values = (value for _, value in self.all(*names, under=under, not_under=not_under))
        return next((value.strip() for value in values if isinstance(value, str) and value.strip() and value != "None"), None)

    def whole(self, *names: str, under: Iterable[str] = (), not_under: Iterable[str] = ()) -> int | None:
        """A positive whole number, also where it was written as text."""
        for _, value in self.all(*names, under=under, not_under=not_under):
            if (number := whole_number(value)) is not None and number > 0:
                return number
        return None

    def number(self, *names: str) -> float | None:
        for _, value in self.all(*names):
            if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and value.bit_length() < 64):
                return float(value)
        return None

    def true(self, *names: str) -> bool:
        return any(value is True for _, value in self.all(*names))

    def false(self, *names: str) -> bool:
        return any(value is False for _, value in self.all(*names))


OFF_KEYS = ("enabled", "enable")


def is_off(section: Any, path: NodePath = ()) -> bool:
    """`dpo: {enabled: false, …}`: a section that the file switches off, or one on the way down to `path`."""
    if isinstance(section, dict) and any(section.get(key) is False for key in OFF_KEYS):
        return True
    return bool(path) and isinstance(section, dict) and is_off(section.get(path[0]), path[1:])


def whole_number(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value.bit_length() < 64 else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            return None
    return None


def _flatten(value: Any, path: NodePath) -> Iterator[tuple[NodePath, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(key, str):
                yield (*path, key), inner
                yield from _flatten(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value[:50]):
            if isinstance(inner, dict):
                yield from _flatten(inner, (*path, str(position)))


MODEL_KEYS = (  # the first is that of transformers' and TRL's parsers
    *("model_name_or_path", "pretrained_model_name_or_path", "model_name", "model_id", "model_path", "base_model_name_or_path"),
    *("load_from_pretrained_path", "encoder_name_or_path"),
    *("base_model_name", "base_model_id", "base_model", "pretrained_model_name", "pretrained_model", "model_checkpoint", "model_repo"),
)
_FURTHER_KEYS = (
    *("model", "base_id", "model_key", "hf_model", "hf_model_id", "hf_model_name", "hf_model_path", "model_id_or_path", "llm", "backbone"),
    *("base_model_path", "pretrained_path", "pretrained_name", "model_name_path", "llm_name", "llm_path", "student_model"),
    *("restore_from", "model_repo_id", "hf_path", "hf_repo", "hub_model", "pretrained_ckpt", "pretrained_checkpoint", "foundation_model"),
    *(
        "huggingface_model",
        "base_checkpoint",
        "model_source",
        "student",
        "policy_model",
        "policy",
        "actor_model",
        "student_model_name_or_path",
    ),
)
_LAST_KEYS = ("config_name", "checkpoint")
_SECTIONS = ("model", "model_args", "modelarguments", "model_arguments", "model_config", "base_model", "pretrained")
_KEYS_IN_A_SECTION = ("name_or_path", "name", "id", "path", "checkpoint", "repo", "pretrained", "hf_name", "base", "hf_id", "repo_id")
_NOT_THE_MODEL = ("tokenizer", "ref_model", "teacher", "reward_model", "adapter", "generation", "inference", "export")
_DATA = ("data", "dataset", "datasets", "data_args", "data_config", "dataset_config", "train_dataset", "eval_dataset", "dataset_mixture")
_BESIDE = frozenset({"reward", "rewards", "judge", "judges", "classifier", "embedding", "embeddings", "evaluation", "eval", "retriever"})
_BESIDE |= frozenset({"reranker", "benchmark", "monitoring", "rag", "llm_judge", "llm-judge", "evaluator", "vllm", "server"})
"""Sections of models that only help: theirs is the one that trains where no other stands in the file."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FAMILY = re.compile(
    r"bert|gpt|llama|qwen|mi[sx]tral|gemma|\bphi\b|phi-?\d|\bm?t5\b|bart|\bopt\b|bloom|pythia|falcon|whisper|wav2vec|hubert|wavlm|\bvit\b"
    r"|deit|swin|clip|dino|electra|smol|olmo|granite|starcoder|deepseek|pegasus|nllb|longformer|xlnet|segformer|resnet|convnext|lfm\d"
)
_HOSTED = re.compile(
    r"(openai/)?(gpt-[345]|o[134]\b)(?!.*oss)|(anthropic/)?claude|(google/)?gemini", re.IGNORECASE
)  # models behind an API train nowhere
_LARGEST_SIBLING_BYTES, _MOST_SIBLINGS = 200_000, 50


def model_name(facts: Facts) -> str | None:
    """The model a config names; None where it names none, or leaves it to a variable."""
    for aside in ((*_NOT_THE_MODEL, *_BESIDE), _NOT_THE_MODEL):
        found = [name for name in _candidates(facts, aside) if "${" not in name and "{{" not in name]
        if found:
            return max(found, key=_likeness)  # the first of equals, in the order of the keys
    return None


def _candidates(facts: Facts, aside: tuple[str, ...]) -> Iterator[str]:
    direct = [*_texts(facts, *MODEL_KEYS, not_under=aside)]
    yield from direct
    if not direct:
        yield from _texts(facts, *_KEYS_IN_A_SECTION, under=_SECTIONS, not_under=aside)
    for name in _texts(facts, *_FURTHER_KEYS, not_under=(*aside, *_DATA)):
        known = facts.has(name.lower())
        yield from _texts(facts, *_KEYS_IN_A_SECTION, *MODEL_KEYS, under=(name.lower(),), not_under=aside) if known else (name,)
    yield from _texts(facts, *_LAST_KEYS, not_under=aside)


def _texts(facts: Facts, *keys: str, under: tuple[str, ...] = (), not_under: tuple[str, ...]) -> Iterator[str]:
    """One text of each key."""
    for key in keys:
        if (text := facts.text(key, under=under, not_under=not_under)) is not None:
            yield text


def _likeness(name: str) -> int:
    """How much it reads like a checkpoint."""
    if _HUB_ID.fullmatch(name) and not name.lower().startswith(("output", "result", "run", "log", "checkpoint", "ckpt", "exp")):
        return 3
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or ".py:" in name or _FAMILY.search(name.lower()):
        return 2
    return 1


def model_named_in(path: Path) -> str:
    """The model that another YAML names."""
    name = _name_in(path)
    if name is None:
        raise ConfigError(f"{path} names no model", hint="it needs a key such as model_name_or_path; or give --model")
    return name


def named_beside(path: Path) -> tuple[Path, str] | None:
    """The YAML in the same folder that names a model, where there is one alone."""
    others = sorted(other for kind in ("*.yaml", "*.yml") for other in path.parent.glob(kind) if other.resolve() != path.resolve())
    found: list[tuple[Path, str]] = []
    for other in others[:_MOST_SIBLINGS]:
        try:
            name = _name_in(other) if other.stat().st_size <= _LARGEST_SIBLING_BYTES else None
        except (ConfigError, OSError):
            continue  # it is not ours to judge
        if name is not None and _HOSTED.match(name) is None:
            found.append((other, name))
    return found[0] if len({name for _, name in found}) == 1 else None


def _name_in(path: Path) -> str | None:
    return model_name(Facts(parse(read_bytes(path), str(path)).data))


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("max_position_embeddings", "embedding_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "d_model", "d_ff", "d_kv"),
    *("num_layers", "num_heads", "num_decoder_layers", "encoder_layers", "decoder_layers", "num_local_experts", "num_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "type_vocab_size", "tie_word_embeddings"),
)
"""Attributes of transformers' configs that decide how large a model is."""


def overrides_of(facts: Facts, *, named: bool) -> dict[str, Any]:
    """What a file changes in a model's configuration, or, of a model that is named nowhere, its type and the sizes beside it.

    `config_overrides` is of transformers' own scripts (run_clm.py).
    """
    stated = facts.text("config_overrides")
    found: dict[str, Any] = {}
    for part in (stated or "").split(","):
        key, _, value = part.partition("=")
        if value:
            found[key.strip()] = _plain(value.strip())
    kinds = [(path, value) for path, value in facts.all("model_type") if isinstance(value, str) and not any(map(str.isdecimal, path))]
    if named or not kinds:
        return found
    place, kind = kinds[0]
    sizes = {key: value for key in _SIZES for path, value in facts.all(key) if path[:-1] == place[:-1] and value is not None}
    return {"model_type": kind.lower(), **sizes, **found} if sizes or found else {}


def _plain(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
