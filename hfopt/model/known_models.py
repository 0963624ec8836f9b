"""The bundled architectures by hub id, and which of them an unknown model was likely made from, by its name alone.

`architectures.jsonl` holds one model per line: its `config.json` fields, the published parameter count with its source, and whether that
counts the model with its head (`head`) or the base model alone (`base`); or, for a model trained from another one, `same_as` and the
fields that differ. Every line states what its own checkpoint is stored in (`torch_dtype`), which a model does not have from the one it was
made from: Gemma 2 is published in float32, its instruct version in bfloat16. Names are matched without regard to case, with or without the
owner: `bert-base-uncased` is `google-bert/bert-base-uncased`.

A name is read as words, sizes and versions. A model of the table is a match when all its own words stand in the name, each with the same
version behind it (`llama-3.1` is not `llama-3`), when both state the same sizes, and when the name has no word of another family
(`llava-…-mistral-7b` is not Mistral) or of another member of it (`falcon-h1-7b` is not Falcon). Of several matches the one that shares
most and adds least counts. A name that does not say enough has none: a wrong architecture is worse than a question.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    hub_id: str
    config: Mapping[str, Any]
    parameters: int  # as published
    counts: Literal["head", "base"]
    rounded: bool  # published as '317M', not to the last parameter
    source: str
    same_as: str | None = None


@cache
def architectures() -> tuple[Architecture, ...]:
    lines = files("hfopt.model").joinpath("architectures.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["id"]: record for record in map(json.loads, lines)}
    return tuple(_architecture(record, records) for record in records.values())


def find(name: str) -> Architecture | None:
    """The entry of that name, in any case; without an owner only when all who have it mean one architecture: then its first owner's."""
    wanted = name.strip().lower()
    exact = [entry for entry in architectures() if entry.hub_id.lower() == wanted]
    bare = [entry for entry in architectures() if entry.hub_id.lower().partition("/")[2] == wanted]
    found = exact or bare
    return found[0] if len({entry.same_as or entry.hub_id for entry in found}) == 1 else None


def find_under_any_owner(name: str) -> Architecture | None:
    """A re-upload: the same name under another owner."""
    owner, _, bare = name.strip().rpartition("/")
    return find(bare) if owner else None


def near_names(name: str, count: int = 3) -> list[str]:
    """Names of the table that the user may have meant."""
    by_key: dict[str, str] = {}
    for entry in architectures():
        by_key[entry.hub_id.lower()] = entry.hub_id
        by_key[entry.hub_id.lower().partition("/")[2]] = entry.hub_id
    wanted = name.strip().lower()
    keys = difflib.get_close_matches(wanted, by_key, n=2 * count, cutoff=0.75)
    keys += difflib.get_close_matches(wanted.rpartition("/")[2], by_key, n=2 * count, cutoff=0.75)
    return list(dict.fromkeys(by_key[key] for key in keys))[:count]


def _architecture(record: dict[str, Any], records: Mapping[str, dict[str, Any]]) -> Architecture:
    base = records[record.get("same_as", record["id"])]
    return Architecture(
        hub_id=record["id"],
        config={**base["config"], **record.get("config", {})},
        parameters=base["parameters"],
        counts=base["counts"],
        rounded=base.get("rounded", False),
        source=record["source"],
        same_as=record.get("same_as"),
    )


_SIZE = re.compile(r"\d+x\d+(?:\.\d+)?b|[ae]?\d+(?:\.\d+)?b|\d{2,}m|\d+b\d+")
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)")
_GLUED = re.compile(r"([a-z]{3,}?)v?(\d+(?:\.\d+)*)")  # qwen2.5, llama3
_GLUED_SIZE = re.compile(r"([a-z]{3,})(\d+(?:\.\d+)?b)")  # mistral7b
_ASIDE = frozenset(  # said of a model's training or packaging, not of its shape
    {
        *("instruct", "chat", "base", "hf", "it", "pt", "sft", "dpo", "rl", "rlhf", "meta", "thinking", "think", "exp", "preview", "ov"),
        *("finetuned", "ade", "pretrained", "pretrain", "lvd1689m", "deduped", "beta", "alpha", "final", "the", "my", "all"),
    }
)
_SIZE_WORDS = frozenset(
    {"tiny", "mini", "small", "base", "medium", "large", "xlarge", "xxlarge", "xl", "xxl", "giant", "huge", "xsmall", "nano"}
)
_OTHER_SHAPE = frozenset(  # beside a family's name they mean another architecture
    {
        *("vl", "vision", "llava", "moe", "mini", "medium", "nemo", "next", "audio", "omni", "mamba", "embedding", "vlm", "video"),
        *("scout", "maverick", "nas", "eagle", "medusa", "draft", "plus", "lite", "flash", "air", "detr", "upernet", "maskformer"),
    }
)
_RUN_FOLDERS = re.compile(r"checkpoint-?\d*|final|merged|output|model|last|best|epoch-?\d*|step-?\d*|snapshot")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A model of the table that shares family, version and size with a name."""

    name: str
    hub_id: str

    @property
    def sentence(self) -> str:
        return f"{self.name} looks like {self.hub_id}: --like {shlex.quote(self.hub_id)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    words: dict[str, str | None]  # each with the version right behind it
    sizes: frozenset[str]
    numbers: frozenset[str]  # every version and date, wherever it stands
    aside: frozenset[str]


def likeliest(name: str) -> Suggestion | None:
    """The model of the table that a hub id or a path names by family, version and size; None where it says too little."""
    for part in _telling_parts(name):
        said = _read(part)
        matches = [(entry, shape) for entry, shape in _shapes() if _fits(said, entry, shape)]
        if matches:
            entry, _ = min(matches, key=lambda match: _distance(said, *match))
            return Suggestion(name=name, hub_id=entry.hub_id)
    return None


def same_numbers(name: str, other: str) -> bool:
    """Whether two names state the same sizes, versions and shapes, so that one may be a slip of the other."""
    numbers = [sorted(re.findall(r"\d+", _bare(one))) for one in (name, other)]
    shapes = [_OTHER_SHAPE & set(re.split(r"[^a-z]+", _bare(one).lower())) for one in (name, other)]
    return numbers[0] == numbers[1] and shapes[0] == shapes[1]


def _telling_parts(name: str) -> list[str]:
    """The last part of an id; of a path also those above it, where the last is a run's own folder name."""
    parts = [part for part in re.split(r"[/\\]+", name.strip()) if part not in ("", ".", "..", "~")]
    parts = [part for part in reversed(parts) if not _RUN_FOLDERS.fullmatch(part.lower())]
    is_path = name.strip().startswith((".", "/", "~")) or len(parts) > 2
    return parts[: 3 if is_path else 1]


def _bare(hub_id: str) -> str:
    return hub_id.rpartition("/")[2]


def _read(text: str) -> _Words:
    text = re.sub(r"(?<=\d)_(?=\d)", ".", text.lower().removesuffix(".json"))
    text = re.sub(r"(?<=[a-z]-)(\d)-(\d)(?=-)", r"\1.\2", text)  # llama-3-1-8b
    words: dict[str, str | None] = {}
    sizes, numbers, aside = set(), set(), set()
    before: str | None = None  # the word a number would belong to
    for chunk in (chunk.strip(".") for chunk in re.split(r"[^a-z0-9.]+", text)):
        word, version, size = _chunk(chunk)
        if word in _ASIDE - _SIZE_WORDS:
            aside.add(word)
            before = None
        elif word:
            words.setdefault(word, None)
            before = word
        if version:
            numbers.add(version)
            if before is not None and words[before] is None and not _is_its_own(chunk, version):
                words[before] = version
        if size:
            sizes.add(size)
        before = before if word and not version and not size else None
    if sizes and words.pop("base", "-") != "-":  # `Qwen3-8B-Base`; bert-base has no other size
        aside.add("base")
    return _Words(words=words, sizes=frozenset(sizes), numbers=frozenset(numbers), aside=frozenset(aside))


def _is_its_own(chunk: str, version: str) -> bool:
    """A date (2407), or a fine-tune's first versions (v0.1): not the family's version."""
    return len(version) >= 4 or chunk.startswith("v0")


def _chunk(chunk: str) -> tuple[str | None, str | None, str | None]:
    """One piece of a name: its word, its version, its size."""
    if not chunk:
        return None, None, None
    if _SIZE.fullmatch(chunk):
        return None, None, chunk
    if match := _VERSION.fullmatch(chunk):
        return None, match[1], None
    if match := _GLUED_SIZE.fullmatch(chunk):
        return match[1], None, match[2]
    if match := _GLUED.fullmatch(chunk):
        return match[1], match[2], None
    return chunk, None, None


@cache
def _shapes() -> tuple[tuple[Architecture, _Words], ...]:
    return tuple((entry, _read(_bare(entry.hub_id))) for entry in architectures())


@cache
def _families() -> frozenset[str]:
    """The first word of every architecture's name: bert, llama, qwen, whisper, …"""
    firsts = (next(iter(shape.words), None) for entry, shape in _shapes() if entry.same_as is None)
    return frozenset(first for first in firsts if first is not None and first not in _SIZE_WORDS)


@cache
def _members() -> dict[str, frozenset[str]]:
    """By family, the words that tell its architectures apart: h1 and mamba of falcon, vision of llama."""
    found: dict[str, set[str]] = {}
    for entry, shape in _shapes():
        if entry.same_as is None:
            for family in _families() & shape.words.keys():
                found.setdefault(family, set()).update(shape.words.keys() - {family} - _SIZE_WORDS)
    return {family: frozenset(words) for family, words in found.items()}


def _resolutions(words: _Words) -> frozenset[str]:
    """224, 448, 896: the images a model takes."""
    return frozenset(number for number in words.numbers if len(number) == 3 and number.isdecimal())


def _fits(said: _Words, entry: Architecture, shape: _Words) -> bool:
    if not shape.words or not shape.words.keys() <= said.words.keys() or not _same_sizes(said.sizes, entry, shape.sizes):
        return False
    foreign = said.words.keys() - shape.words.keys()
    own_family = _families() & shape.words.keys()
    kin = frozenset().union(*(_members().get(family, frozenset()) for family in own_family))
    if foreign & (_families() | _OTHER_SHAPE | kin) or (not shape.sizes and _SIZE_WORDS & foreign):
        return False
    if (own := _resolutions(shape)) and not _resolutions(said) <= own:
        return False
    binding = _families() | _SIZE_WORDS
    return all(said.words[word] == version if word in binding or version is not None else True for word, version in shape.words.items())


def _same_sizes(said: frozenset[str], entry: Architecture, own: frozenset[str]) -> bool:
    """Every size that is said must be the model's: in its name, or by its parameters where the name has none (Mistral-Nemo, 12b).

    `30b` is `30b-a3b` where nothing else is said.
    """
    if not own and len(said) == 1:
        return any(abs(billions * 1e9 / entry.parameters - 1) < 0.05 for billions in _billions(next(iter(said))))
    active = {size for size in own if size.startswith("a")}
    return said <= own and own - active <= said


def _billions(size: str) -> list[float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([bm])", size)
    return [float(match[1]) * (1 if match[2] == "b" else 1e-3)] if match else []


def _distance(said: _Words, entry: Architecture, shape: _Words) -> tuple[int, int, int, bool, str]:
    shared = 2 * len(shape.words) + len(said.aside & shape.aside) + len(said.numbers & shape.numbers)
    foreign = len(said.words.keys() - shape.words.keys())
    added = len(shape.aside - said.aside) + len(shape.numbers - said.numbers) + len(shape.sizes - said.sizes)
    return -shared, added, foreign, entry.same_as is not None, entry.hub_id.lower()
