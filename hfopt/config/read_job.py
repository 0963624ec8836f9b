"""Config in: a YAML file becomes a TrainJob, with everything that is wrong with it reported at once.

The job's arguments have current names and right types even where the file does not, so that later stages need not know how it was written.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.config.axolotl import translate
from hfopt.config.find_arguments import Section, SectionLayout, find
from hfopt.config.interpolation import left_over
from hfopt.config.lookup import Facts, whole_number
from hfopt.config.model_and_data import COMPLETIONS, read_data, read_evaluation_spec, read_model, states_dtype, with_guesses
from hfopt.config.other_keys import unread
from hfopt.config.other_tools import TRL, Dialect, ToolSpelling, dialect_of, implied, is_axolotl, tool_of, torchtune_words
from hfopt.config.settings import trainer_settings
from hfopt.config.trainer_kind import names_trainer, trainer_kind
from hfopt.config.training_arguments import ACCUMULATION, ATTENTION, BATCH, GONE, trl_keys
from hfopt.config.translation import Translation, judge_translation
from hfopt.config.validate import FoundProblem, SectionReader, check_together
from hfopt.config.yaml_document import Document, NodePath, parse, read_bytes
from hfopt.errors import ConfigError
from hfopt.facts.argument_effects import as_of
from hfopt.facts.training_keys import NEW_SPELLINGS, TRAINERS, Installed, installed, trl_parser_keys
from hfopt.redact import is_secret
from hfopt.schema import GENERATING, Place, Problem, TrainerKind, TrainJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """Where an argument stands: the mapping's path and the key as the file writes it."""

    path: NodePath
    key: str
    word: ToolSpelling | None = None  # the tool's own way to say it


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    job: TrainJob | None  # None: a batch value is unreadable, or several profiles and nothing says which
    problems: tuple[Problem, ...]
    source: bytes
    document: Document
    layout: SectionLayout
    homes: Mapping[str, Home]  # by the argument's current name
    found: tuple[FoundProblem, ...]  # the findings about keys, with what --upgrade does about them
    transformers_version: str  # what it was checked against
    unread: tuple[str, ...] = ()  # sentences about keys that are set and that no figure shows
    aside: frozenset[Problem] = frozenset()  # those of the problems that other profiles have than the job's

    def place_of(self, key: str) -> Place | None:
        """Where the file sets an argument; None where it does not."""
        home = self.homes.get(key)
        node = self.document.node(home.path) if home is not None else None
        entry = node.find(home.key) if node is not None and home is not None else None
        return self.document.place(entry.key_start) if entry is not None else None


def load(
    path: Path, *, section: str | None = None, world_size: int = 1, has_bf16: bool = True, for_transformers: str | None = None
) -> Loaded:
    """Reads the file; raises ConfigError when it is no TrainingArguments YAML at all. `has_bf16`: the card, for a precision left to it;
    `for_transformers`: the version that will read the file, if not the installed one."""
    source = read_bytes(path)
    return load_bytes(source, str(path), section=section, world_size=world_size, has_bf16=has_bf16, for_transformers=for_transformers)


def load_bytes(
    source: bytes,
    path: str,
    *,
    section: str | None = None,
    world_size: int = 1,
    has_bf16: bool = True,
    for_transformers: str | None = None,
) -> Loaded:
    document = parse(source, path)
    return load_document(document, section=section, world_size=world_size, has_bf16=has_bf16, for_transformers=for_transformers)


def load_document(
    document: Document,
    *,
    section: str | None = None,
    world_size: int = 1,
    has_bf16: bool = True,
    for_transformers: str | None = None,
) -> Loaded:
    path, present = document.path, installed() if for_transformers is None else as_of(for_transformers)
    if world_size < 1:
        raise ConfigError(f"a world size of {world_size}: there is at least one process")
    if section is None and is_axolotl(document.resolved):
        return _load_translated(document, translate(document.resolved, has_bf16=has_bf16), present, world_size)
    if section is None and (tool := tool_of(document.data)) is not None:
        raise _refusal(path, tool, document.resolved)
    layout = find(document, present, section)
    if not layout.checked:
        raise ConfigError(
            f"{path}: no TrainingArguments in it",
            hint="keys such as per_device_train_batch_size are looked for at the root and in every section; name one with --section",
        )
    return _Reading(document, layout, present, world_size, has_bf16).loaded()


def _refusal(path: str, tool: str, data: Mapping[Any, Any]) -> ConfigError:
    if tool == "torchtune":
        what, hint = torchtune_words(data)
        return ConfigError(f"{path}: {what}", hint=hint)
    hint = "hfopt reads YAMLs of TrainingArguments, TRL, LLaMA-Factory, ms-swift and axolotl"
    if tool.startswith("accelerate"):
        hint = f"it says how a training is launched; give the training's own config, and this one with --accelerate {path}"
    return ConfigError(f"{path}: a config of {tool}, not of the HuggingFace Trainer", hint=hint)


def _load_translated(document: Document, made: Translation, present: Installed, world_size: int) -> Loaded:
    """A file of another tool, at whose root the arguments stand under its own keys."""
    facts, judged = Facts(dict(made.facts)), judge_translation(made, document, present)
    homes = {name: Home(path=(), key=word.key, word=word) for name, word in made.spellings.items()}
    keys = {name: word.key for name, word in made.spellings.items() if document.root.find(word.key) is not None}
    main = Section(path=(), node=document.root, keys=keys, score=len(keys))
    job = None
    if not {problem.key for problem in judged.problems if problem.severity == "error"} & _batch_names(homes):
        args = {**_trl_arguments(facts, made.trainer), **judged.args}
        model = read_model(facts, made.trainer, args)
        job = TrainJob(
            path=document.path,
            section=(),
            trainer=made.trainer,
            raw=args,
            settings=trainer_settings(args, made.trainer),
            model=replace(model, guessed_adapter=False, float32_modules=made.float32_modules, notes=(*model.notes, *made.notes)),
            data=read_data(facts, made.trainer),
            per_device_batch=int(args[BATCH]),
            accumulation=int(args[ACCUMULATION]),
            world_size=world_size,
            tool=made.tool,
            uses_trl=made.uses_trl,
            kept=_kept(document, homes),
            unwritable=made.unwritable,
            evaluation=read_evaluation_spec(facts),
        )
    problems = sorted(judged.problems, key=lambda problem: problem.place.line if problem.place else 0)
    return Loaded(
        transformers_version=present.version,
        job=job,
        problems=tuple(problems),
        source=document.text.encode("utf-8"),
        document=document,
        layout=SectionLayout(main=main),
        homes=homes,
        found=(),
    )


_GROUP_SIZES = (
    "group_size",
    "num_samples_per_prompt",
    "rollouts_per_prompt",
    "generations_per_prompt",
    "samples_per_prompt",
)  # what scripts call num_generations


def _trl_arguments(facts: Facts, trainer: TrainerKind) -> dict[str, Any]:
    """The keys of TRL's own config: arguments of the trainer too, though not of TrainingArguments."""
    said = {key: facts.get(key) for key in trl_keys(trainer) if facts.has(key)}
    if trainer in GENERATING and (group := facts.whole("num_generations", *_GROUP_SIZES)) is not None:
        said["num_generations"] = group
    if trainer in GENERATING and (length := facts.whole(*COMPLETIONS)) is not None:
        said["max_completion_length"] = length
    if trainer == "CPO" and facts.has("gamma_beta_ratio"):  # the SimPO paper's own trainer: its likelihood term is off unless sft_weight
        said = {**said, "loss_type": "simpo", "cpo_alpha": facts.number("sft_weight") or 0.0}
    plain = {key: value for key, value in said.items() if value not in (None, "None", "null") and not is_secret(key, value)}
    return {key: whole_number(value) if isinstance(value, str) and value.isdecimal() else value for key, value in plain.items()}


class _Reading:
    """One pass over the sections that count."""

    def __init__(self, document: Document, layout: SectionLayout, present: Installed, world_size: int, has_bf16: bool) -> None:
        self.document, self.layout, self.present, self.world_size, self.has_bf16 = document, layout, present, world_size, has_bf16
        self.facts = Facts(document.resolved, near=layout.main.path if layout.main else (), left_out=layout.other_branches())

    def loaded(self) -> Loaded:
        args: dict[str, Any] = {}
        homes: dict[str, Home] = {}
        found: list[FoundProblem] = []
        aside: list[FoundProblem] = []
        trainer = trainer_kind(self.facts, self.document.path, self.document.resolved)
        dialect = dialect_of(self.facts, trainer)
        if self.present is not installed():  # the TRL beside another transformers is not known
            dialect = replace(dialect, gone={})
        for section in self.layout.checked:
            read = SectionReader(self.document, section, self.present, dialect).read()
            (aside if self.layout.main is not None and section in self.layout.rivals else found).extend(read.found)
            if section not in self.layout.rivals:
                args = {**read.args, **args}
                homes = homes if section in self.layout.around else {**self._homes(section, read.args), **homes}
        job = None
        if self.layout.main is not None:
            homes = {**self._words(dialect, self.layout.main), **self._stated_once(ATTENTION), **homes}
            found.extend(check_together(args, self.facts, trainer, self.world_size, lambda key: self._place_of(key, homes)))
            if not any(item.problem.key in _batch_names(homes) for item in _unusable(found)):
                unstated = implied(dialect, self.facts, args, self.world_size, has_bf16=self.has_bf16)
                if not self._is_read_by_a_script(trainer, dialect):
                    unstated.pop("eval_strategy", None)  # `trl` adds none
                job = self._job({**unstated, **_trl_arguments(self.facts, trainer), **args}, trainer, homes)
        problems = list(dict.fromkeys(item.problem for item in (*found, *aside))) + list(self._about_the_file(found))
        problems.sort(key=lambda problem: (problem.place.line, problem.place.column) if problem.place else (0, 0))
        return Loaded(
            job=job,
            problems=tuple(problems),
            source=self.document.text.encode("utf-8"),
            document=self.document,
            layout=self.layout,
            homes=homes,
            found=(*found, *aside),
            aside=frozenset(item.problem for item in aside),
            transformers_version=self.present.version,
            unread=tuple(unread(self.facts, ((), *(section.path for section in self.layout.checked)))) if job is not None else (),
        )

    def _words(self, dialect: Dialect, main: Section) -> dict[str, Home]:
        """Where the tool looks for arguments that it calls otherwise, set in the file or not."""
        found: dict[str, Home] = {}
        for name, word in dialect.words.items():
            path = next((path[:-1] for path, _ in self.facts.all(word.key)), main.path)
            found[name] = Home(path=path, key=word.key, word=word)
        return found

    def _stated_once(self, key: str) -> dict[str, Home]:
        """Where the file states a key that is none of TrainingArguments; nothing where it is not clear which statement counts."""
        paths = [path for path, _ in self.facts.all(key)]
        return {key: Home(path=paths[0][:-1], key=key)} if len(paths) == 1 else {}

    def _homes(self, section: Section, args: Mapping[str, Any]) -> dict[str, Home]:
        homes: dict[str, Home] = {}
        for real, written in section.keys.items():
            if real != written and real not in args and real not in (BATCH, ACCUMULATION):
                continue  # a script's own key with a value of its own
            gone = GONE.get(real)
            name = gone.to if gone is not None and real not in self.present.fields and gone.to and gone.values is None else real
            homes.setdefault(name, Home(path=section.path, key=written))
        return homes | {old: homes[new] for old, new in NEW_SPELLINGS.items() if new in homes}

    def _place_of(self, key: str, homes: Mapping[str, Home]) -> Any:
        home = homes.get(key) or Home(path=self.layout.main.path if self.layout.main else (), key=key)
        node = self.document.node(home.path)
        definer = node.definer(home.key) if node is not None else None
        entry = definer.find(home.key) if definer is not None else None
        return self.document.place(entry.key_start if entry is not None else node.start if node is not None else 0)

    def _is_read_by_a_script(self, trainer: Any, dialect: Dialect) -> bool:
        """`trl` reads one flat file, and stops at a key that it does not know."""
        if trainer not in TRAINERS or self.layout.main is None or self.layout.main.path:
            return True
        taken = trl_parser_keys(trainer)
        return taken is not None and any(
            key not in taken.keys and key not in dialect.gone and key not in GONE for key in self.document.data
        )

    def _job(self, args: dict[str, Any], trainer: Any, homes: Mapping[str, Home]) -> TrainJob:
        assert self.layout.main is not None
        dialect = dialect_of(self.facts, trainer)
        own_script = self._is_read_by_a_script(trainer, dialect)
        model = read_model(self.facts, trainer, args)
        loads_itself = dialect.name == TRL.name and own_script and not states_dtype(self.facts)
        model = with_guesses(model) if own_script and not dialect.own_reader else replace(model, guessed_adapter=False)
        return TrainJob(
            path=self.document.path,
            section=self.layout.main.path,
            trainer=trainer,
            raw=args,
            settings=trainer_settings(args, trainer),
            model=replace(model, loads_itself=loads_itself),
            data=read_data(self.facts, trainer),
            per_device_batch=int(args.get(BATCH, self.present.fields[BATCH].default)),
            accumulation=int(args.get(ACCUMULATION, self.present.fields[ACCUMULATION].default)),
            world_size=self.world_size,
            tool=dialect.name if dialect.own_reader else None,
            uses_trl=dialect.name == TRL.name,
            own_script=own_script,
            guessed_trainer=own_script and not dialect.own_reader and not names_trainer(self.facts, trainer),
            kept=_kept(self.document, homes),
            evaluation=read_evaluation_spec(self.facts),
        )

    def _about_the_file(self, found: list[FoundProblem]) -> Iterator[Problem]:
        main, rivals = self.layout.main, self.layout.rivals
        names = ", ".join(rival.name for rival in rivals)
        if main is None:
            message = f"several sections hold TrainingArguments: {names}"
            yield Problem(
                severity="error",
                code="several_sections",
                key=None,
                place=None,
                message=message,
                fix=f"--section {shlex.quote(rivals[0].name)}",
            )
        elif rivals and not self.layout.asked:
            message = f"read from {main.name} ({self.layout.why}); others: {names}"
            yield Problem(
                severity="note", code="several_sections", key=None, place=None, message=message, fix="--section NAME takes another"
            )
        reported = " ".join(item.problem.message for item in found)
        if "${" in self.document.text and (unresolved := [one for one in left_over(self.document.resolved) if one not in reported]):
            names = ", ".join(unresolved[:3]) + (", …" if len(unresolved) > 3 else "")
            message = f"only another program can fill in {names}"
            yield Problem(severity="note", code="unresolved", key=None, place=None, message=message, fix="write the values themselves")
        for key in _BUILT_ON:
            others = self.document.data.get(key)
            if others := [one for one in (others if isinstance(others, list) else [others]) if _YAML.search(str(one))]:
                message = f"the file builds on {', '.join(map(str, others))}, which is not read here"
                place = self.document.place(_key_start(self.document, key))
                yield Problem(severity="note", code="builds_on", key=key, place=place, message=message, fix="give one file with all of it")
        if isinstance(self.document.data.get("defaults"), list):
            place = self.document.place(_key_start(self.document, "defaults"))
            message = "Hydra composes this file with others (`defaults:`), which are not read here"
            yield Problem(
                severity="note", code="hydra", key="defaults", place=place, message=message, fix="python SCRIPT --cfg job > resolved.yaml"
            )


_BUILT_ON = ("extends", "inherits", "inherit_from", "base", "base_config", "_base_", "include", "includes", "parent", "defaults")
_YAML = re.compile(r"\.ya?ml$")


def _unusable(found: list[FoundProblem]) -> Iterator[FoundProblem]:
    codes = {"unresolved", "wrong_type", "bad_value", "null_value"}
    yield from (item for item in found if item.problem.code in codes and item.problem.severity == "error")


def _batch_names(homes: Mapping[str, Home]) -> set[str]:
    return {BATCH, ACCUMULATION} | {homes[key].key for key in (BATCH, ACCUMULATION) if key in homes}


def _key_start(document: Document, key: str) -> int:
    entry = document.root.find(key)
    return entry.key_start if entry is not None else 0


_KEEP = re.compile(r"#\s*hfopt:\s*keep\b[ \t]*:?[ \t]*([\w, \t]*)")


def _kept(document: Document, homes: Mapping[str, Home]) -> frozenset[str]:
    """`# hfopt: keep` keeps the key of its line, or of the next line when it stands alone; `# hfopt: keep a, b` keeps a and b."""
    kept: set[str] = set()
    starts = (*document.line_starts, len(document.text))
    lines = [document.text[start:end].rstrip("\r\n") for start, end in itertools.pairwise(starts)]
    by_line: dict[int, str] = {}
    for name, home in homes.items():
        node = document.node(home.path)
        entry = node.find(home.key) if node is not None else None
        if entry is not None:
            by_line[document.place(entry.key_start).line] = name
    for number, line in enumerate(lines, start=1):
        match = _KEEP.search(line)
        if match is None:
            continue
        named = set(re.findall(r"\w+", match[1]))
        if named:
            kept |= {next((name for name, home in homes.items() if home.key == word), word) for word in named}
        elif line.lstrip().startswith("#"):
            following = [there for there in sorted(by_line) if there > number]
            kept |= {by_line[following[0]]} if following else set()
        elif number in by_line:
            kept.add(by_line[number])
    return frozenset(kept)
