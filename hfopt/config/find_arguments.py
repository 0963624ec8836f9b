"""Where in a file the TrainingArguments are: at the root, under any name, split over several sections, or in one profile of many.

Every mapping is scored by the keys of TrainingArguments it holds. The best one is the section; others that share none of its keys add
theirs (split arguments); others that set the same keys are rivals (profiles), and a selector, the name `default` or the user decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.config.lookup import is_off
from hfopt.config.training_arguments import ACCUMULATION, ALIASES, BATCH, GONE, MAYBE_WHOLE, NEWER
from hfopt.config.yaml_document import Document, Node, NodePath, shared_depth
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import Installed

_SECTION_NAMES = frozenset(
    {
        *("training", "train", "trainer", "args", "training_args", "trainingarguments", "training_arguments", "trainer_args", "train_args"),
        *("trainer_config", "training_config", "sft_config", "dpo_config", "grpo_config", "training_params", "seq2seqtrainingarguments"),
        *("hyperparameters", "hyperparams", "hparams"),
    }
)
_STRONG_PREFIXES = (
    *("per_device_", "per_gpu_", "gradient_", "dataloader_", "warmup_", "eval_", "evaluation_", "save_", "logging_", "lr_", "adam_"),
)
_WEAK = frozenset(
    {
        *("seed", "project", "debug", "use_cache", "deepspeed", "do_train", "do_eval", "do_predict", "fp16", "bf16", "tf32", "optim"),
        *("run_name", "output_dir"),
    }
)
_RIVAL_KEYS = frozenset({BATCH, ACCUMULATION, "learning_rate", "num_train_epochs", "max_steps"})
_NOT_SECTIONS = frozenset(
    {
        *("gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "accelerator_config", "fsdp_config", "deepspeed", "deepspeed_config"),
        *("dataset_mixture", "dataset_mixer", "dataset_kwargs", "model_init_kwargs", "generation_kwargs", "generation_config"),
        *("liger_kernel_config", "parallelism_config", "quantization_config", "bnb_config"),
    }
)
_MAX_DEPTH, _MAX_ITEMS = 6, 200  # deeper, or further down a list, nobody keeps arguments
_OF_OTHER_PROGRAMS = frozenset(
    {"vllm", "test_vllm", "sglang", "inference", "generation", "generate", "sampling", "serve", "serving", "deploy"}
)
_DEFAULT_NAMES = frozenset({"default", "defaults"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One mapping with TrainingArguments in it."""

    path: NodePath
    node: Node
    keys: Mapping[str, str]  # real key -> the key in the file
    score: int

    @property
    def name(self) -> str:
        return ".".join(self.path) or "the root"


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionLayout:
    """The section that is meant, those that add to it, and its rivals. main=None: several profiles and nothing says which."""

    main: Section | None
    added: tuple[Section, ...] = ()
    around: tuple[Section, ...] = ()  # sections it stands in: their values hold where it has none, and are not its to change
    rivals: tuple[Section, ...] = ()
    why: str | None = None  # how one of several was chosen
    asked: bool = False  # by the user: then the rivals are no concern

    @property
    def checked(self) -> tuple[Section, ...]:
        """The sections whose keys are looked at."""
        return (*((self.main,) if self.main else ()), *self.added, *self.around, *(() if self.asked else self.rivals))

    def other_branches(self) -> list[NodePath]:
        """The parts of the file that belong to a rival: from where its path leaves the main one's."""
        if self.main is None:
            return []
        return [rival.path[: shared_depth(self.main.path, rival.path) + 1] for rival in self.rivals]


def real_keys(present: Installed) -> frozenset[str]:
    """Every name a key of TrainingArguments has or had."""
    return frozenset({*present.fields, *present.seq2seq, *GONE, *NEWER})


def find(document: Document, present: Installed, section: str | None) -> SectionLayout:
    candidates = list(_candidates(document, real_keys(present)))
    if section is not None:
        main = _asked_for(document, section, candidates)
        return SectionLayout(
            main=main,
            rivals=tuple(other for other in candidates if other is not main and _share(other, main) and not _inside(main, other)),
            asked=True,
        )
    on = [one for one in candidates if not is_off(document.data, one.path) and not _is_deepspeeds(one.node)]
    found = [candidate for candidate in on or candidates if candidate.score >= 2]
    if not found:
        return SectionLayout(main=None)
    best = max(found, key=lambda candidate: (candidate.score, -len(candidate.path)))
    best = next((other for other in found if _inside(best, other) and _share(best, other)), best)  # what holds it comes first
    if any(not _is_aside(one) for one in found):
        found = [one for one in found if not _is_aside(one)]
        best = best if best in found else max(found, key=lambda candidate: (candidate.score, -len(candidate.path)))
    rivals = [other for other in found if other is not best and _share(other, best)]
    if not rivals:
        apart = _apart(best, found)
        if apart:  # profiles beside what they share: nothing says which of them is meant
            return SectionLayout(main=None, rivals=apart)
        return SectionLayout(main=best, added=_adding(best, on or candidates))
    chosen, why = _choose([best, *rivals], document.data)
    if chosen is None:
        return SectionLayout(main=None, rivals=tuple(sorted((best, *rivals), key=lambda one: one.node.start)))
    around = tuple(other for other in (best, *rivals) if _inside(chosen, other))
    others = tuple(other for other in (best, *rivals) if other is not chosen and other not in around)
    return SectionLayout(main=chosen, around=around, why=why, rivals=others)


def _candidates(document: Document, real: frozenset[str]) -> Iterator[Section]:
    for path, value in _mappings(document.data, (), _NOT_SECTIONS | real):
        node = document.node(path)
        if node is not None and node.kind == "mapping":
            keys = {name: name for name in value if isinstance(name, str) and name in real}
            for name in sorted(value, key=lambda name: name in MAYBE_WHOLE):
                meant = _meant(name, real) if isinstance(name, str) and not isinstance(value[name], dict | list) else None
                if meant is not None and meant not in keys:
                    keys[meant] = name
            if keys:
                yield Section(path=path, node=node, keys=keys, score=_score(path, keys))


def _meant(name: str, real: frozenset[str]) -> str | None:
    """The key that a script's own name stands for: an alias, or the name with dashes, as on a command line."""
    plain = name.replace("-", "_")
    return plain if plain != name and plain in real else ALIASES.get(plain)


def _mappings(value: Any, path: NodePath, closed: frozenset[str]) -> Iterator[tuple[NodePath, dict[Any, Any]]]:
    """Every mapping down to a sensible depth, but not inside the value of an argument."""
    if len(path) > _MAX_DEPTH:
        return
    if isinstance(value, dict):
        yield path, value
        for key, inner in value.items():
            if isinstance(key, str) and key not in closed:
                yield from _mappings(inner, (*path, key), closed)
    elif isinstance(value, list):
        for position, inner in enumerate(value[:_MAX_ITEMS]):
            if isinstance(inner, dict):
                yield from _mappings(inner, (*path, str(position)), closed)


def _score(path: NodePath, keys: Mapping[str, str]) -> int:
    score = 0
    for real, written in keys.items():
        if real in _RIVAL_KEYS and real == written:
            score += 4
        elif real == written and real.startswith(_STRONG_PREFIXES):
            score += 3
        else:
            score += 0 if real in _WEAK and len(keys) == 1 else 1
    if path and path[-1].lower() in _SECTION_NAMES:
        score += 2
    return score


_ASIDE = frozenset({"valid", "val", "validation", "eval", "evaluation", "test", "testing", "infer", "inference", "predict", "prediction"})


def _is_aside(section: Section) -> bool:
    """Settings for what comes beside the training (`valid_param: {batch_size: 64}`): never its rival."""
    return bool(section.path) and bool(_ASIDE & set(re.split(r"[\W_]+", section.path[-1].lower())))


def _is_deepspeeds(node: Node) -> bool:
    return any(node.find(key) is not None for key in ("zero_optimization", "train_micro_batch_size_per_gpu"))


def _share(one: Section, other: Section) -> bool:
    """Both set what only one may set."""
    return bool(one.keys.keys() & other.keys.keys() & _RIVAL_KEYS)


def _inside(one: Section, other: Section) -> bool:
    return len(one.path) > len(other.path) and one.path[: len(other.path)] == other.path


def _adding(main: Section, candidates: list[Section]) -> tuple[Section, ...]:
    """Sections that hold more of the same job's arguments: none of the keys already taken, and not only a `seed`."""
    taken, added = set(main.keys), []
    for other in candidates:
        fresh = other.keys.keys() - taken - _WEAK
        if _OF_OTHER_PROGRAMS.intersection(part.lower() for part in other.path):
            fresh -= GONE.keys()  # `vllm: {tp_size: 2}` was never the Trainer's
        if other is not main and fresh and not other.keys.keys() & taken & _RIVAL_KEYS and not any(part.isdecimal() for part in other.path):
            added.append(other)
            taken |= other.keys.keys()
    return tuple(added)


def _apart(main: Section, found: list[Section]) -> tuple[Section, ...]:
    """Sections beside the main one that each set a batch, where it sets none."""
    if BATCH in main.keys:
        return ()
    batches = [one for one in found if BATCH in one.keys and one.keys[BATCH] == BATCH and not any(_inside(one, two) for two in found)]
    return tuple(batches) if len(batches) > 1 else ()


def _choose(sections: list[Section], data: dict[str, Any]) -> tuple[Section | None, str | None]:
    """One of several, and why: what a selector names, what holds all others, what its name or its merge keys say, the default."""
    words = {value: key for key, value in data.items() if isinstance(key, str) and isinstance(value, str)}
    for section in sections:
        for part in section.path:
            if part in words:
                return section, f"`{words[part]}: {part}` names it"
    outermost = min(sections, key=lambda section: len(section.path))
    if all(other is outermost or _inside(other, outermost) for other in sections):
        return outermost, "the others are inside it"
    named = [section for section in sections if section.path and section.path[-1].lower() in _SECTION_NAMES]
    highest = [section for section in named if len(section.path) == min(len(other.path) for other in named)]
    if len(highest) == 1:
        return highest[0], "by its name"
    leaves = [section for section in sections if not any(section.node in other.node.merged() for other in sections)]
    if len(leaves) == 1:
        return leaves[0], "the others are merged into it"
    for section in sections:
        if any(part.lower() in _DEFAULT_NAMES for part in section.path):
            return section, "it is the default one"
    return None, None


def _asked_for(document: Document, section: str, candidates: list[Section]) -> Section:
    path = tuple(section.split(".")) if section not in ("", ".") else ()
    for candidate in candidates:
        if candidate.path == path or ".".join(candidate.path) == section:  # a key may have dots in it: Qwen2.5
            return candidate
    node = document.node(path)
    others = ", ".join(candidate.name for candidate in candidates if candidate.score >= 2)
    hint = f"sections with TrainingArguments: {others}" if others else None
    if node is None:
        raise ConfigError(f"{document.path}: no section {section!r}", hint=hint)
    if node.kind != "mapping":
        place = document.place(node.start)
        raise ConfigError(f"{document.path}:{place.line}: {section} is not a mapping of keys to values", hint=hint)
    return Section(path=path, node=node, keys={}, score=0)
