"""What is wrong or outdated in a config, key by key and between keys: each with its place, and the repair where one is certain."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.compat.versions import release
from hfopt.config.deepspeed_json import is_missing
from hfopt.config.find_arguments import Section
from hfopt.config.lookup import MODEL_KEYS, Facts
from hfopt.config.model_and_data import Trainer
from hfopt.config.other_keys import broken_rules
from hfopt.config.other_tools import Dialect, is_llama_factory
from hfopt.config.training_arguments import (
    ACCUMULATION,
    ALIASES,
    BATCH,
    BEFORE,
    GONE,
    NEWER,
    QUIET_ALIASES,
    WITHOUT_IT,
    Gone,
    Severity,
    ValueVerdict,
    judge,
    known_elsewhere,
    trl_keys,
)
from hfopt.config.yaml_document import Document, YamlEntry
from hfopt.config.yaml_splices import Operation, render
from hfopt.facts.training_keys import NEW_SPELLINGS, TRAINERS, Field, Installed, installed
from hfopt.redact import HIDDEN, is_secret, shown
from hfopt.schema import Place, Problem

_EXACT_SECTIONS = frozenset(["training_args", "trainingarguments", "training_arguments", "trainer_args", "seq2seqtrainingarguments"])
_FOREIGN_VALUE = frozenset({"wrong_type", "unknown_value", "removed_value", "unresolved", "none_as_string"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundProblem:
    """A finding; `repair` is what `--upgrade` does about it."""

    problem: Problem
    repair: tuple[Operation, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What a section came to: its arguments under their current names, where each stands, and the findings."""

    args: Mapping[str, Any]
    found: tuple[FoundProblem, ...]


class SectionReader:
    """Reads one section of a document, as the tool reads it whose dialect it is in."""

    def __init__(self, document: Document, section: Section, present: Installed, dialect: Dialect) -> None:
        self.document, self.section, self.present = document, section, present
        self.values: dict[str, Any] = document.resolved_value(section.path)
        self.dialect = dialect
        self.args: dict[str, Any] = {}
        self.found: list[FoundProblem] = []
        self._aliased = {name: real for real, name in section.keys.items() if real != name}
        self._scripted = any(name not in QUIET_ALIASES for name in self._aliased) or self._is_mixed()

    def _is_mixed(self) -> bool:
        """A section with keys that no class takes, or a root that names the model as no parser does: a script takes its keys one by one."""
        if not self.section.path:
            return MODEL_KEYS[0] not in self.values and any(key in self.values for key in MODEL_KEYS)
        known = {*self.present.fields, *self.present.seq2seq, *GONE, *NEWER, *(key for kind in TRAINERS for key in trl_keys(kind))}
        others = [key for key in self.values if isinstance(key, str) and key not in known]
        return any(nearest(key, self.present.fields) is None for key in others) and self.section.path[-1].lower() not in _EXACT_SECTIONS

    def read(self) -> Read:
        for key, value in self.values.items():
            if isinstance(key, str):
                self._read_key(key, value)
        self.found.extend(self._duplicates())
        renamed = {old: self.args.pop(new) for old, new in NEW_SPELLINGS.items() if new in self.args}  # the new one counts
        return Read(args=self.args | renamed, found=tuple(self.found))

    def _field(self, key: str) -> Field | None:
        return self.present.fields.get(key) or self.present.seq2seq.get(key)

    def _read_key(self, key: str, value: Any) -> None:
        field = self._field(key)
        if (older := self._older(key, value)) is not None:
            self._read_newer(key, older)
        elif field is not None:
            self._take(key, key, self._judge(key, key, value, field))
        elif key in self.dialect.gone and not self.section.path and not self._scripted:
            self._read_gone_from_tool(key, self.dialect.gone[key])
        elif key in GONE:
            self._read_gone(key, value, GONE[key])
        elif (real := self._aliased.get(key)) is not None:
            self._read_alias(key, real, value)
        elif key in NEWER:
            hint = f"in {self.present.version}: {NEWER[key]}" if NEWER[key] else "drop it, or upgrade transformers"
            self._say(key, "newer_key", "error", f"{key} is newer than transformers {self.present.version}", hint)
        elif key not in known_elsewhere() and not isinstance(value, dict):
            self._read_unknown(key, value)

    def _take(self, key: str, written: str, verdict: ValueVerdict) -> None:
        if is_secret(written, verdict.usable):
            message = f"{written} is written out in the file: whoever has the file has the account"
            self._say(written, "secret", "warning", message, "drop the line and run `hf auth login`, or set HF_TOKEN")
        elif verdict.usable is not None:
            self.args[key] = verdict.usable

    def _judge(self, key: str, written: str, value: Any, field: Field) -> ValueVerdict:
        verdict = judge(key, value, field)
        cost = self.dialect.text_costs.get(verdict.code or "")
        if cost is not None and isinstance(value, str):
            message = f"{verdict.message}; {self.dialect.name} converts it, HfArgumentParser does not"
            verdict = replace(verdict, severity=cost, message=message)
        if verdict.code is not None:
            certain = verdict.repair and not (self.dialect.own_reader and cost is not None)  # what its reader converts is no fault
            repair = (Operation(path=self.section.path, key=written, after=verdict.usable),) if certain else ()
            message, fix = verdict.message.replace(key, written, 1), verdict.fix and verdict.fix.replace(key, written, 1)
            self._say(written, verdict.code, verdict.severity, message, fix, repair)
        return verdict

    def _read_alias(self, key: str, real: str, value: Any) -> None:
        """A script's own name for an argument. Its values may be the script's own too (`optimizer: AdamW`): those are none of ours."""
        field = self._field(real)
        if field is None:
            return
        if real not in (BATCH, ACCUMULATION) and judge(real, value, field).code in _FOREIGN_VALUE:
            return
        verdict = self._judge(real, key, value, field)
        self._take(real, key, verdict)
        if key not in QUIET_ALIASES and verdict.usable is not None:
            self._say(key, "alias", "note", f"{key} is read as {real}", None)

    def _read_gone(self, key: str, value: Any, gone: Gone) -> None:
        """A key of an older transformers: dropped, renamed, moved into a mapping, or left to the user."""
        target = gone.to if gone.to is not None and self._field(gone.to) is not None else None
        new = value if gone.values is None else gone.values.get(value) if isinstance(value, bool) else None
        taken = target is not None and self._already(target, key)
        cannot_say = key == "warmup_ratio" and isinstance(new, int | float) and not isinstance(new, bool) and new >= 1
        by_hand = gone.by_hand and value not in (None, False, "", 0, [])  # else it asked for nothing
        if by_hand or (gone.to is not None and target is None) or (gone.inside is not None and taken) or cannot_say:
            self._say_gone(key, gone, "removed_key", None)
        elif target is None or new is None or taken or gone.by_hand:
            fix = f"drop the line; {target} is set already" if taken else "drop the line"
            self._say_gone(key, gone, "removed_key", fix, Operation(path=self.section.path, key=key, remove=True))
        elif gone.inside is not None:
            self.args[target] = {gone.inside: value}
            move = Operation(path=self.section.path, key=key, rename_to=target, after={gone.inside: value})
            self._say_gone(key, gone, "renamed_key", f"{target}: {{{gone.inside}: {shown(key, value)}}}", move)
        else:
            self._rename(key, value, new, target, gone)

    def _older(self, key: str, value: Any) -> tuple[str, Any] | None:
        """How an older transformers writes what a newer one calls by this key; None: it knows the key, or has nothing of the kind."""
        old = BEFORE.get(key)
        if old is None or old.key in self.values or self._field(old.key) is None:
            return None
        fraction = key == "warmup_steps" and isinstance(value, float) and 0 < value < 1 and release(self.present.version) < (5, 0)
        return (old.key, old.say(value)) if fraction or self._field(key) is None else None

    def _read_newer(self, key: str, older: tuple[str, Any]) -> None:
        name, value = older
        message = f"{key}: {_brief(key, self.values[key])} is newer than transformers {self.present.version}"
        if value is None:
            self._say(key, "newer_key", "error", message, "drop the line", (Operation(path=self.section.path, key=key, remove=True),))
            return
        self.args[name] = value
        rename = Operation(path=self.section.path, key=key, rename_to=name, after=value, keep_value=value is self.values[key])
        self._say(key, "newer_key", "error", message, f"{name}: {_brief(name, value)}", (rename,))

    def _read_gone_from_tool(self, key: str, new: str | None) -> None:
        """A key that the tool's parser took once and refuses now."""
        message = f"{key} is gone from TRL {self.dialect.version}, whose parser refuses it{WITHOUT_IT.get(key, '')}"
        if new is None or new in self.values:
            fix = "drop the line" if new is None else f"drop the line; {new} is set already"
            self._say(key, "removed_key", "error", message, fix, (Operation(path=self.section.path, key=key, remove=True),))
            return
        if (field := self._field(new)) is not None:
            self._take(new, key, judge(new, self.values[key], field))
        rename = Operation(path=self.section.path, key=key, rename_to=new, after=self.values[key], keep_value=True)
        self._say(key, "renamed_key", "error", message, f"{new}: {_brief(new, self.values[key])}", (rename,))

    def _rename(self, key: str, value: Any, new: Any, target: str, gone: Gone) -> None:
        field = self._field(target)
        assert field is not None
        verdict = judge(target, new, field)
        self._take(target, key, verdict)
        if verdict.code is not None and not verdict.repair:
            self._say(key, verdict.code, verdict.severity, verdict.message.replace(target, key, 1), verdict.fix)
        after = verdict.usable if verdict.repair else new
        drop = [Operation(path=self.section.path, key=target, remove=True)] if target in self.values else []
        rename = Operation(path=self.section.path, key=key, rename_to=target, after=after, keep_value=after is value)
        self._say_gone(key, gone, "renamed_key", f"{target}: {_brief(target, after)}", *drop, rename)

    def _say_gone(self, key: str, gone: Gone, code: str, fix: str | None, *repair: Operation) -> None:
        if self.dialect.own_reader:
            return  # its parser's affair
        if self._scripted:
            message = f"{key} is gone from transformers {self.present.version}: {gone.why}; it stays for the script that reads this section"
            self._say(key, code, "warning", message, fix and f"{fix}, in the script as well")
            return
        self._say(key, code, "error", f"{key} is gone from transformers {self.present.version}: {gone.why}", fix, repair)

    def _already(self, target: str, key: str) -> bool:
        """The successor is set too. warmup_steps: 0 does not count: v4 took the ratio then."""
        return target in self.values and not (key == "warmup_ratio" and self.values[target] in (0, None))

    def _read_unknown(self, key: str, value: Any) -> None:
        near = nearest(key, (name for name in (*self.present.fields, *GONE, *ALIASES) if name not in self.values))
        while near is not None and near not in self.present.fields:  # a misspelt old name or alias: the real key is meant
            near = ALIASES.get(near) or GONE[near].to if near in ALIASES or near in GONE else None
        if near in self.values or near in self._aliased.values():
            near = None
        field = self._field(near or "")
        if field is not None and near is not None and judge(near, value, field).code == "wrong_type":
            near = None  # `seeds: [1, 2]` is not a misspelt seed
        exact = bool(self.section.path) and self.section.path[-1].lower() in _EXACT_SECTIONS and not self._scripted
        if near is not None:
            self._say(key, "unknown_key", "warning", f"{key} is not a key of TrainingArguments", f"did you mean {near}?")
        elif exact:
            message = f"{key} is not a key of TrainingArguments, which refuses keys it does not know"
            self._say(key, "unknown_key", "warning", message, "move it to a section of its own")

    def _duplicates(self) -> Iterator[FoundProblem]:
        seen: dict[str, YamlEntry] = {}
        for entry in self.section.node.entries:
            if entry.key and entry.key in seen and not entry.merge:
                first = self.document.place(seen[entry.key].key_start)
                message = f"{entry.key} is set twice, first in line {first.line}; the last one wins"
                place = self.document.place(entry.key_start)
                yield FoundProblem(
                    problem=Problem(severity="warning", code="duplicate_key", key=entry.key, place=place, message=message, fix="drop one")
                )
            seen[entry.key] = entry

    def _say(self, key: str, code: str, severity: Severity, message: str, fix: str | None, repair: tuple[Operation, ...] = ()) -> None:
        definer = self.section.node.definer(key)
        entry = definer.find(key) if definer is not None else None
        place = self.document.place(entry.key_start if entry is not None else self.section.node.start)
        problem = Problem(severity=severity, code=code, key=key, place=place, message=message, fix=fix)
        self.found.append(FoundProblem(problem=problem, repair=repair))


def nearest(key: str, candidates: Iterable[str]) -> str | None:
    """A key it may be a misspelling of: nearly all letters agree. `eval_epochs` is not `eval_steps`."""
    said = key.lower().replace("-", "_")
    pairs = _pairs(said)
    possible = [name for name in candidates if 2 * len(pairs & _pairs(name)) >= max(len(pairs), len(_pairs(name)))]
    close = difflib.get_close_matches(said, possible, n=1, cutoff=0.87)
    return close[0] if close else None


@cache
def _pairs(text: str) -> frozenset[str]:
    """Its neighbouring letters: a cheap sieve before the exact comparison."""
    return frozenset(text[position : position + 2] for position in range(len(text) - 1))


def _brief(key: str, value: Any) -> str:
    return HIDDEN if is_secret(key, value) else render(value)


PlaceOf = Callable[[str], Place]


def check_together(args: Mapping[str, Any], facts: Facts, trainer: Trainer, world_size: int, place_of: PlaceOf) -> Iterator[FoundProblem]:
    if args.get("fp16") is True and args.get("bf16") is True:
        message = "fp16 and bf16 are both true; TrainingArguments refuses that"
        yield _found("error", "conflict", "fp16", place_of, message, "keep bf16 where the card has it")
    yield from (*_check_best_model(args, place_of), *_check_deepspeed(args, place_of))
    if trainer == "GRPO":
        yield from _check_generations(args, facts, world_size, place_of)
    factory = is_llama_factory(facts)
    if trainer == "KTO" and not factory:  # which trains KTO with a collator of its own, and with batch 1
        yield from _check_neighbours(args, facts, place_of)
    for rule in broken_rules(facts) if factory else ():
        yield _found("error", "refused_by_tool", rule.key, place_of, f"{rule.message}; LLaMA-Factory refuses to start", rule.fix)
    if trainer == "SFT":
        yield from _check_rows(args, facts, place_of)
    if _in_force(args, "dataloader_num_workers") == 0 and args.get("dataloader_prefetch_factor") is not None:
        message = "dataloader_prefetch_factor needs dataloader_num_workers above 0; PyTorch refuses it otherwise"
        yield _found("error", "conflict", "dataloader_prefetch_factor", place_of, message, "dataloader_num_workers: 2")


def _check_deepspeed(args: Mapping[str, Any], place_of: PlaceOf) -> Iterator[FoundProblem]:
    """A warning: the file may stand where the training starts. On several devices a plan needs it, or --assume-zero."""
    value = args.get("deepspeed")
    if value and is_missing(value, Path(place_of("deepspeed").path).parent):
        message = f"deepspeed: {value} is not there, neither here nor beside this file or in the folders above it"
        yield _found("warning", "missing_file", "deepspeed", place_of, message, "give its path from where the training starts")


def _check_best_model(args: Mapping[str, Any], place_of: PlaceOf) -> Iterator[FoundProblem]:
    if args.get("load_best_model_at_end") is not True:
        return
    saving, evaluating = _in_force(args, "save_strategy"), _in_force(args, "eval_strategy")
    if saving != "best" and saving != evaluating:
        message = f"load_best_model_at_end needs equal strategies, but save_strategy is {saving} and eval_strategy is {evaluating}"
        fix = f"eval_strategy: {saving}" if saving != "no" else None
        severity = "error" if "eval_strategy" in args or "eval_steps" not in args else "warning"  # else a script may well set it
        yield _found(severity, "conflict", "load_best_model_at_end", place_of, message, fix)
    every_save, every_eval = _in_force(args, "save_steps"), args.get("eval_steps", _in_force(args, "logging_steps"))
    whole = all(isinstance(value, int | float) and value >= 1 for value in (every_save, every_eval))
    if saving == evaluating == "steps" and whole and every_save % every_eval:
        message = f"load_best_model_at_end needs save_steps ({every_save}) to be a multiple of eval_steps ({every_eval})"
        yield _found(
            "error", "conflict", "save_steps", place_of, message, f"save_steps: {math.ceil(every_save / every_eval) * int(every_eval)}"
        )


def _check_generations(args: Mapping[str, Any], facts: Facts, world_size: int, place_of: PlaceOf) -> Iterator[FoundProblem]:
    """What GRPOConfig refuses: per device × world × steps_per_generation (default: the accumulation) must be a multiple of
    num_generations, a stated generation_batch_size one of the global batch too."""
    yield from _refused_by_grpo(args, facts, place_of)
    generations = facts.whole("num_generations") or 8
    yield from _check_evaluated(args, facts.whole("num_generations_eval") or generations, world_size, place_of)
    batch, accumulation = _in_force(args, BATCH), _in_force(args, ACCUMULATION)
    if not isinstance(batch, int) or not isinstance(accumulation, int):
        return
    steps = facts.whole("steps_per_generation") or accumulation
    per_process = batch * steps
    stated = facts.whole("generation_batch_size")
    total = stated or per_process * world_size
    if stated and stated % (batch * world_size):
        message = f"generation_batch_size {stated} is no multiple of the global batch ({batch} per device × world size {world_size})"
        whole = math.lcm(batch * world_size, generations)
        fix = f"generation_batch_size: {whole * max(1, stated // whole)}"
        yield _found("warning", "not_divisible", "generation_batch_size", place_of, message, fix)
    elif stated and total % generations:
        message = f"generation_batch_size {stated} does not divide by num_generations {generations}, which GRPO needs"
        yield _found("warning", "not_divisible", "generation_batch_size", place_of, message, None)
    elif total % generations:
        world = generations // math.gcd(per_process, generations)
        message = (
            f"{total} samples per generation ({batch} per device × {steps} steps × world size {world_size}) do not divide by"
            f" num_generations {generations}, which GRPO needs"
        )
        multiple = generations // math.gcd(steps * world_size, generations)
        fix = f"a world size that is a multiple of {world} (--world-size), or a {BATCH} that is a multiple of {multiple}"
        yield _found("warning", "not_divisible", "num_generations", place_of, message, fix)


def _check_evaluated(args: Mapping[str, Any], generations: int, world_size: int, place_of: PlaceOf) -> Iterator[FoundProblem]:
    """GRPOConfig's rule for an evaluation: its batch holds whole groups of completions."""
    key = "per_device_eval_batch_size"
    batch = _in_force(args, key)
    if _in_force(args, "eval_strategy") in ("no", None, False) or not isinstance(batch, int) or not batch * world_size % generations:
        return
    message = f"{batch * world_size} samples per evaluation batch do not divide by {generations} generations, which GRPO needs"
    multiple = generations // math.gcd(world_size, generations)
    yield _found("warning", "not_divisible", key, place_of, message, f"{key}: {multiple * max(1, -(-batch // multiple))}")


def _refused_by_grpo(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[FoundProblem]:
    if facts.whole("generation_batch_size") and facts.whole("steps_per_generation"):
        message = "generation_batch_size and steps_per_generation are both set; GRPOConfig takes one of them"
        yield _found("error", "conflict", "generation_batch_size", place_of, message, "drop one of them")
    if facts.whole("num_generations") == 1:
        message = "num_generations is 1; GRPO compares the completions of a prompt and needs at least 2"
        yield _found("error", "bad_value", "num_generations", place_of, message, "num_generations: 8")
    if args.get("auto_find_batch_size") is True:
        message = "auto_find_batch_size would break GRPO's groups of completions; GRPOConfig refuses it"
        yield _found("error", "conflict", "auto_find_batch_size", place_of, message, "drop the line; `hfopt run` survives a shortage")


def _check_neighbours(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[FoundProblem]:
    """KTO's KL term pairs each prompt with its neighbour's completion, within the micro-batch."""
    if facts.text("loss_type") == "apo_zero_unpaired":
        return
    if (sampling := args.get("train_sampling_strategy")) not in (None, "sequential"):
        message = f"train_sampling_strategy is {sampling}; KTO pairs neighbours that were chosen beforehand, in their order"
        yield _found("error", "conflict", "train_sampling_strategy", place_of, message, "train_sampling_strategy: sequential")
    if args.get(BATCH) == 1:
        message = f"{BATCH} is 1; KTO estimates its KL term within the micro-batch, which needs at least 2 samples"
        yield _found("error", "bad_value", BATCH, place_of, message, f"{BATCH}: 2, with half the {ACCUMULATION}")


def _check_rows(args: Mapping[str, Any], facts: Facts, place_of: PlaceOf) -> Iterator[FoundProblem]:
    """padding_free lays the samples of a batch in one row, where nothing cuts them; packing cuts and fills the rows itself."""
    if facts.true("padding_free") and not facts.true("packing") and facts.whole("max_length", "max_seq_length") is not None:
        message = "padding_free without packing does not enforce max_length: a longer sample takes more memory than planned"
        yield _found("warning", "conflict", "padding_free", place_of, message, "packing: true, or cut the samples beforehand")


def _in_force(args: Mapping[str, Any], key: str) -> Any:
    """What the file sets, else the installed default."""
    return args[key] if key in args else installed().fields[key].default


def _found(severity: Any, code: str, key: str, place_of: PlaceOf, message: str, fix: str | None) -> FoundProblem:
    return FoundProblem(problem=Problem(severity=severity, code=code, key=key, place=place_of(key), message=message, fix=fix))
