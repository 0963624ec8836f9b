"""The keys of the installed TrainingArguments and of TRL's configs, read from their sources: no import (seconds), one parse (milliseconds).

Only the part of the class before its first method is parsed; the enums that name allowed values are read the same way.

`trl sft --config FILE` and its scripts parse a YAML into three classes: the script's arguments, the trainer's config (a TrainingArguments)
and the model's (trl/scripts/sft.py, `make_parser`). A key that none of them has is refused (trl/scripts/utils.py, TrlParser).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hfopt.compat.versions import package_version, source_folder
from hfopt.errors import ConfigError

_SIMPLE = {"int": "int", "float": "float", "bool": "bool", "str": "str", "dict": "dict", "list": "list", "None": "none", "Path": "str"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One key: which kinds of value it takes ('int', 'float', 'bool', 'str', 'dict', 'list', 'none'; empty: anything) and its default."""

    kinds: frozenset[str] = frozenset()
    choices: tuple[str, ...] = ()  # of an enum
    default: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What the installed transformers offers."""

    version: str
    fields: Mapping[str, Field]
    seq2seq: Mapping[str, Field] = field(default_factory=dict)


@cache
def installed() -> Installed:
    folder, version = source_folder("transformers"), package_version("transformers")
    if folder is None or version is None:
        raise ConfigError("transformers is not installed, so its TrainingArguments are unknown", hint="pip install transformers")
    try:
        return read(folder, version)
    except OSError as error:
        raise ConfigError(f"cannot read the installed transformers: {error}") from error


@cache
def trl_default(trainer: str, key: str) -> Any:
    """The default of a key in the installed TRL's config of a trainer ('GRPO'); None where TRL or the key is not there."""
    folder = source_folder("trl")
    source = None if folder is None else folder / "trainer" / f"{trainer.lower()}_config.py"
    if source is None or not source.is_file():
        return None
    text = source.read_text(encoding="utf-8")
    head = _class_head(text, f"{trainer}Config")
    found = _fields(text, f"{trainer}Config", {}).get(key) if head is not None else None
    return None if found is None else found.default


def read(folder: Path, version: str) -> Installed:
    """The fields in `folder/training_args.py` and its companions."""
    source = (folder / "training_args.py").read_text(encoding="utf-8")
    companions = (folder / "trainer_utils.py").read_text(encoding="utf-8")
    enums = _enums(source) | _enums(companions)
    seq2seq = (folder / "training_args_seq2seq.py").read_text(encoding="utf-8")
    return Installed(
        version=version,
        fields=_fields(source, "TrainingArguments", enums),
        seq2seq=_fields(seq2seq, "Seq2SeqTrainingArguments", enums),
    )


@cache
def trl_config(trainer: str) -> Mapping[str, Field]:
    """The fields that the installed TRL's config of this trainer (SFT, DPO, ...) adds to TrainingArguments or sets anew; {} without TRL."""
    package = source_folder("trl")
    if package is None:
        return {}
    folder = package / "trainer"
    found: dict[str, Field] = {}
    for file, name in (("base_config.py", "_BaseConfig"), (f"{trainer.lower()}_config.py", f"{trainer}Config")):
        path = folder / file
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        if re.search(rf"^class {name}\b", source, re.MULTILINE):
            found |= _fields(source, name, {})
    return found


def fields_of(source: str, name: str) -> dict[str, Field] | None:
    """The fields that a dataclass in this source adds itself; None: there is no such class."""
    return None if _class_head(source, name) is None else _fields(source, name, {})


def _class_head(source: str, name: str) -> ast.ClassDef | None:
    """The class up to its first method, its docstring left out: what is worth parsing of a 3,000-line file."""
    match = re.search(rf"^class {name}\b.*$", source, re.MULTILINE)
    if match is None:
        return None
    body = source[match.end() :]
    body = re.sub(r'\A\s*r?""".*?"""[^\n]*\n', "\n", body, count=1, flags=re.DOTALL)
    stop = re.search(r"^(?:    (?:def |@)|\S)", body, re.MULTILINE)
    tree = ast.parse(f"class {name}:\n    pass\n{body[: stop.start()] if stop else body}")
    head = tree.body[0]
    return head if isinstance(head, ast.ClassDef) else None


def _fields(source: str, name: str, enums: Mapping[str, tuple[str, ...]]) -> dict[str, Field]:
    head = _class_head(source, name)
    assert head is not None, f"{name} is not where transformers keeps it"
    found: dict[str, Field] = {}
    for statement in head.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and not statement.target.id.startswith("_"):
            names = {node.id for node in ast.walk(statement.annotation) if isinstance(node, ast.Name)}
            names |= {str(node.value) for node in ast.walk(statement.annotation) if isinstance(node, ast.Constant)}
            choices = tuple(value for enum in sorted(names & enums.keys()) for value in enums[enum]) or _choices(statement.value)
            found[statement.target.id] = Field(kinds=_kinds(statement.annotation), choices=choices, default=_default(statement.value))
    return found


def _kinds(annotation: ast.expr) -> frozenset[str]:
    """int | None -> {int, none}; an unknown class (an enum, Any) beside `str` is a str; alone it says nothing."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _kinds(left) | _kinds(right)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return _kinds(inner) | {"none"}
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=members)):
            return frozenset().union(*(_kinds(member) for member in members))
        case ast.Subscript(value=ast.Name(id="list" | "List")):
            return frozenset({"list"})
        case ast.Subscript(value=ast.Name(id="dict" | "Dict")):
            return frozenset({"dict"})
        case ast.Subscript(value=ast.Name(id="Literal")):
            return frozenset({"bool", "str"})
        case ast.Name(id=name):
            return frozenset({_SIMPLE[name]}) if name in _SIMPLE else frozenset()
        case ast.Constant(value=None):
            return frozenset({"none"})
        case ast.Constant(value=str(text)):
            return _kinds(ast.parse(text, mode="eval").body)
        case _:
            return frozenset()


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
    try:
        return ast.literal_eval(value) if value is not None else None
    except ValueError:
        return None


def _choices(value: ast.expr | None) -> tuple[str, ...]:
    """The literal `choices` of a field's metadata."""
    for node in ast.walk(value) if value is not None else ():
        if isinstance(node, ast.Dict):
            for key, choices in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(choices, ast.List):
                    return tuple(str(choice.value) for choice in choices.elts if isinstance(choice, ast.Constant))
    return ()


def _enums(source: str) -> dict[str, tuple[str, ...]]:
    """The string enums of a module: class name -> values."""
    found: dict[str, tuple[str, ...]] = {}
    for match in re.finditer(r"^class (\w+)\((?:ExplicitEnum|str, Enum|Enum)\):$", source, re.MULTILINE):
        values = re.match(r"(?:\n|    [^\n]*\n)*", source[match.end() :])
        found[match[1]] = tuple(re.findall(r'^    [A-Z0-9_]+ = "([^"]*)"', values[0] if values else "", re.MULTILINE))
    return found


TRAINERS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")
_BESIDE = (
    ("trainer/model_config.py", "ModelConfig"),
    ("scripts/utils.py", "ScriptArguments"),
    ("scripts/utils.py", "DatasetMixtureConfig"),
)
_SCRIPT_KEYS: Mapping[str, frozenset[str]] = {
    "GRPO": frozenset({"reward_model_name_or_path", "reward_funcs"}),  # trl/scripts/grpo.py
    "RLOO": frozenset({"reward_model_name_or_path", "reward_funcs"}),  # trl/scripts/rloo.py
}
_ALWAYS = frozenset({"env"})  # TrlParser itself

# Old name -> new name, by comparing the fields of TRL's configs over its versions.
RENAMED: dict[str, str] = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "use_liger": "use_liger_kernel",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "wandb_log_unique_prompts": "log_unique_prompts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlKeys:
    """What one trainer's parser takes."""

    version: str
    keys: frozenset[str]


@cache
def trl_parser_keys(trainer: str) -> TrlKeys | None:
    """None: TRL is not installed, keeps its configs elsewhere, or has no such trainer."""
    folder, config = source_folder("trl"), trl_config(trainer)
    if folder is None or trainer not in TRAINERS or not config:
        return None
    keys: set[str] = {*installed().fields, *config, *_SCRIPT_KEYS.get(trainer, ()), *_ALWAYS}
    for file, name in _BESIDE:
        path = folder / file
        found = fields_of(path.read_text(encoding="utf-8"), name) if path.is_file() else None
        if found is None:
            return None
        keys |= found.keys()
    return TrlKeys(version=package_version("trl") or "unknown", keys=frozenset(keys))


NEW_SPELLINGS: Mapping[str, str] = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Arguments that transformers 5.23 renamed (training_args.py, `__post_init__`): it takes both names, warns of the old one, and the new one
wins. hfopt calls them by the old name, which every version takes: a file with neither gets that one, a file with the new one keeps it."""


def as_spelled(args: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """The arguments by the names that a class with these fields prefers."""
    return {NEW_SPELLINGS[key] if NEW_SPELLINGS.get(key) in fields else key: value for key, value in args.items()}


def both_spellings(values: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """What to set on live arguments: those that transformers 5.23 renamed under both names, as it keeps them itself."""
    new = {NEW_SPELLINGS[key]: value for key, value in values.items() if key in NEW_SPELLINGS}
    return {**values, **{key: value for key, value in new.items() if hasattr(args, key)}}


PRECISION_KEYS = ("fp16", "bf16", "tf32")
CHECKPOINTING_KWARGS = "gradient_checkpointing_kwargs"
CHECKPOINTING_KEYS = ("gradient_checkpointing", CHECKPOINTING_KWARGS)
