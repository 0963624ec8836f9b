"""TrainingArguments' keys and values: which keys there are, which went and what replaced them, and whether a value is what its key takes.

What exists is read from the installed transformers; the tables only say what became of what does not. PyYAML decides the type of a value:
`5e-5` is text (a float needs a dot), an unquoted `no` is false, `None` is the text 'None'.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hfopt.facts.training_keys import NEW_SPELLINGS, Field
from hfopt.redact import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same module under its old name

BATCH, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
ATTENTION = "attn_implementation"  # not an argument of the Trainer, but many files state it beside them


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A key of an older transformers. `to` names its successor, None: simply drop it; `value` maps old values to new ones."""

    to: str | None
    why: str
    values: Mapping[Any, Any] | None = None  # old -> new; the new None drops the key
    inside: str | None = None  # it is an entry of the mapping `to` now
    by_hand: bool = False  # the new place is not one key: reported, not changed


# Source: transformers' migration guide to v5 and the removals in training_args.py from 4.46 to 5.22.
GONE: dict[str, Gone] = {
    "evaluation_strategy": Gone(to="eval_strategy", why="renamed in 4.46"),
    "warmup_ratio": Gone(to="warmup_steps", why="in v5 a warmup_steps below 1 is the ratio"),
    "group_by_length": Gone(
        to="train_sampling_strategy", why="one of three sampling strategies in v5", values={True: "group_by_length", False: None}
    ),
    "overwrite_output_dir": Gone(to=None, why="v5 never looks into output_dir before it writes"),
    "logging_dir": Gone(to=None, why="v5 takes it from the environment variable TENSORBOARD_LOGGING_DIR"),
    "per_gpu_train_batch_size": Gone(to=BATCH, why="its old name"),
    "per_gpu_eval_batch_size": Gone(to="per_device_eval_batch_size", why="its old name"),
    "no_cuda": Gone(to="use_cpu", why="its old name"),
    "use_mps_device": Gone(to=None, why="Apple's device is found by itself"),
    "push_to_hub_token": Gone(to="hub_token", why="its old name"),
    "push_to_hub_model_id": Gone(to="hub_model_id", why="its old name"),
    "push_to_hub_organization": Gone(to="hub_model_id", why="write organization/name into hub_model_id", by_hand=True),
    "adafactor": Gone(to="optim", why="an optimizer is chosen by `optim`", values={True: "adafactor", False: None}),
    "include_inputs_for_metrics": Gone(to="include_for_metrics", why="a list since 4.46", values={True: ["inputs"], False: None}),
    "include_tokens_per_second": Gone(
        to="include_num_input_tokens_seen", why="it is reported with the tokens seen", values={True: True, False: None}
    ),
    "fp16_backend": Gone(to=None, why="autocast is the only backend left"),
    "half_precision_backend": Gone(to=None, why="autocast is the only backend left"),
    "fp16_opt_level": Gone(to=None, why="Apex is gone"),
    "save_safetensors": Gone(to=None, why="v5 always saves safetensors"),
    "torchdynamo": Gone(to="torch_compile_backend", why="its old name"),
    "jit_mode_eval": Gone(to=None, why="removed with its backend"),
    "use_ipex": Gone(to=None, why="removed with its backend"),
    "tpu_num_cores": Gone(to=None, why="set by the TPU launcher"),
    "tpu_metrics_debug": Gone(to="debug", why="an option of `debug`", values={True: "tpu_metrics_debug", False: None}),
    "past_index": Gone(to=None, why="removed with the models that used it"),
    "ray_scope": Gone(to=None, why="set it in hyperparameter_search"),
    "mp_parameters": Gone(to=None, why="SageMaker model parallelism is gone"),
    "use_legacy_prediction_loop": Gone(to=None, why="there is one prediction loop"),
    "tp_size": Gone(to="parallelism_config", why="tensor parallelism is set in accelerate's ParallelismConfig", by_hand=True),
    "fsdp_min_num_params": Gone(to="fsdp_config", inside="min_num_params", why="an entry of fsdp_config in v5"),
    "fsdp_transformer_layer_cls_to_wrap": Gone(
        to="fsdp_config", inside="transformer_layer_cls_to_wrap", why="an entry of fsdp_config in v5"
    ),
    "sharded_ddp": Gone(to="fsdp", why="fairscale is gone; use fsdp", by_hand=True),
    "xpu_backend": Gone(to="ddp_backend", why="its old name"),
}

# What changes for the training when TRL's parser no longer takes a key.
WITHOUT_IT = {"max_prompt_length": "; prompts are not cut to it any more, so leave longer ones out of the dataset"}

# Values that went while their key stayed: key -> old value -> new value.
GONE_VALUES: dict[str, dict[Any, Any]] = {
    "optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OldSpelling:
    """How an older transformers wrote a newer key."""

    key: str
    values: Mapping[Any, Any] | None = None  # new -> old; a value that is not here has no old one, and the key is dropped

    def say(self, value: Any) -> Any:
        return value if self.values is None else self.values.get(tuple(value) if isinstance(value, list) else value)


# The way back, for a file that an older transformers will read. Source: as for GONE.
BEFORE: dict[str, OldSpelling] = {
    "eval_strategy": OldSpelling(key="evaluation_strategy"),
    "warmup_steps": OldSpelling(key="warmup_ratio"),
    "train_sampling_strategy": OldSpelling(key="group_by_length", values={"group_by_length": True}),
    "include_for_metrics": OldSpelling(key="include_inputs_for_metrics", values={("inputs",): True}),
    **{new: OldSpelling(key=old) for old, new in NEW_SPELLINGS.items()},
}

_NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("key_names.toml").read_text(encoding="utf-8"))
NEWER: dict[str, str] = _NAMES["newer"]
"""Keys that came after 4.40, with what says the same in an older transformers."""
ALIASES: dict[str, str] = {alias: key for key, aliases in _NAMES["aliases"].items() for alias in aliases}
"""What other scripts call the same thing."""

# Of several aliases in one section these count last: beside a `micro_batch_size` they are the batch of a whole step.
MAYBE_WHOLE = ("batch_size", "train_batch_size")
WHOLE_BATCHES = ("global_batch_size", "total_batch_size", "effective_batch_size", "total_train_batch_size", "global_train_batch_size")

# Aliases that a tool of its own reads: right as they are, so not worth a word.
QUIET_ALIASES = frozenset({"enable_liger_kernel", "use_liger"})

# Values TrainingArguments takes though its annotation does not say so.
ALSO_TAKES: dict[str, frozenset[str]] = {"fsdp": frozenset({"bool", "list"}), "report_to": frozenset({"list"})}


def kin(key: str) -> tuple[str, ...]:
    """The neighbours of a key, nearest first."""
    return tuple(other for group in _NAMES["kin"] if key in group for other in group if other != key)


@cache
def _known_keys() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(Path(__file__).with_name("known_keys.toml").read_text(encoding="utf-8"))
    return table


@cache
def known_elsewhere() -> frozenset[str]:
    """Keys of other argument classes that share a file with TrainingArguments."""
    groups = [group for table in _known_keys().values() for group in ([table] if "keys" in table else table.values())]
    return frozenset(key for group in groups for key in group["keys"])


def trl_keys(trainer: str) -> frozenset[str]:
    """The keys that TRL's config of this trainer adds to TrainingArguments; "script": those of the scripts' other classes."""
    tables = _known_keys()["trl"]
    if trainer in ("RLOO", "ORPO", "CPO"):
        return frozenset(tables["other"]["keys"]) | frozenset(tables["GRPO" if trainer == "RLOO" else "DPO"]["keys"])
    return frozenset(tables.get(trainer, {"keys": ()})["keys"])


Severity = Literal["error", "warning", "note"]
UNRESOLVED = re.compile(r"\$\{|\{\{|\{%|^<[A-Za-z_ ]+>$|^\$[A-Za-z_]\w*$|^\?\?\?$")  # OmegaConf, jinja, <value>, $VALUE, ???
_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_AT_LEAST_ONE = {"per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueVerdict:
    """`usable`: the value as the key wants it, None when there is none (then the default holds)."""

    usable: Any
    code: str | None = None
    severity: Severity = "error"
    message: str = ""
    fix: str | None = None
    repair: bool = False  # writing `usable` into the file is the fix


def judge(key: str, value: Any, field: Field) -> ValueVerdict:
    """The verdict on the value, and on what a repair would make of it."""
    verdict = _judge(key, value, field)
    if verdict.repair:
        repaired = _judge(key, verdict.usable, field)
        return verdict if repaired.code is None else repaired
    return verdict


def _judge(key: str, value: Any, field: Field) -> ValueVerdict:
    kinds = field.kinds | ALSO_TAKES.get(key, frozenset())
    if value is None:
        return _judge_null(key, kinds)
    if key == "gradient_checkpointing" and value == "unsloth":  # its own way to do it; TrainingArguments takes any text for true
        return ValueVerdict(usable=True)
    if isinstance(value, str) and UNRESOLVED.search(value) and (not kinds or not kinds & {"str", "dict"}):
        message = f"{key} is {shown(key, value)}, which only another program can fill in"
        return ValueVerdict(usable=None, code="unresolved", message=message, fix="write the value itself, or resolve the file first")
    if (
        isinstance(value, str)
        and value in ("None", "none", "null")
        and "none" in kinds
        and "none" not in field.choices
        and key != "report_to"
    ):
        return ValueVerdict(
            usable=None, code="none_as_string", severity="warning", message=f"{key} is the text {value!r}, not nothing", fix=f"{key}: null"
        )
    if field.choices and kinds & {"str"}:
        return _judge_choice(key, value, field.choices)
    if kinds & {"int", "float"} and not _is_kind(value, kinds):
        return _judge_number(key, value, kinds)
    if "bool" in kinds and not _is_kind(value, kinds):
        return _judge_bool(key, value)
    if kinds - {"none"} and not _is_kind(value, kinds) and not isinstance(value, int | float):
        return _wrong_type(key, value, kinds)
    if isinstance(value, float) and not math.isfinite(value):
        return ValueVerdict(usable=None, code="bad_value", severity="warning", message=f"{key} is {value}, not a number to train with")
    if key in _AT_LEAST_ONE and isinstance(value, int) and not 1 <= value < 1 << 31:
        wanted = "at least 1" if value < 1 else f"below {1 << 31}"
        return ValueVerdict(usable=None, code="bad_value", message=f"{key} is {shown(key, value)}; it must be {wanted}")
    return ValueVerdict(usable=value)


def _is_kind(value: Any, kinds: frozenset[str]) -> bool:
    if isinstance(value, bool):
        return "bool" in kinds
    if isinstance(value, int):
        return bool(kinds & {"int", "float"})
    names: tuple[tuple[type, str], ...] = ((float, "float"), (str, "str"), (dict, "dict"), (list, "list"))
    return any(isinstance(value, kind) and name in kinds for kind, name in names)


def _judge_null(key: str, kinds: frozenset[str]) -> ValueVerdict:
    if not kinds or "none" in kinds:
        return ValueVerdict(usable=None)
    if kinds & {"int", "float"} and "bool" not in kinds:
        return ValueVerdict(
            usable=None, code="null_value", message=f"{key} is null, but a number is needed", fix="write a number, or drop the line"
        )
    return ValueVerdict(
        usable=None, code="null_value", severity="note", message=f"{key} is null; the default was probably meant", fix="drop the line"
    )


def _judge_number(key: str, value: Any, kinds: frozenset[str]) -> ValueVerdict:
    wanted = "a whole number" if "float" not in kinds else "a number"
    if isinstance(value, str):
        number = _number(value)
        if number is None or ("float" not in kinds and not float(number).is_integer()):
            return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is the text {shown(key, value)}, but {wanted} is needed")
        usable: int | float = number if "float" in kinds else int(number)
        message = f"{key} is the text {value!r} to PyYAML, not a number" + (" (a float needs a dot)" if "e" in value.lower() else "")
        return ValueVerdict(usable=usable, code="number_as_string", message=message, fix=f"{key}: {_spelled(value, usable)}", repair=True)
    if isinstance(value, float) and value.is_integer():
        message = f"{key} is {value}, but {wanted} is needed"
        return ValueVerdict(
            usable=int(value), code="wrong_type", severity="warning", message=message, fix=f"{key}: {int(value)}", repair=True
        )
    return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is {shown(key, value)}, but {wanted} is needed")


def _judge_bool(key: str, value: Any) -> ValueVerdict:
    word = str(value).lower()
    if isinstance(value, str | int) and word in _TRUE | _FALSE:
        usable = word in _TRUE
        text = f"{key} is {shown(key, value)}, not true or false" + ("; any text counts as true" if isinstance(value, str) else "")
        severity: Severity = "error" if isinstance(value, str) and not usable else "warning"
        return ValueVerdict(
            usable=usable, code="bool_as_string", severity=severity, message=text, fix=f"{key}: {word_of(usable)}", repair=True
        )
    return ValueVerdict(usable=None, code="wrong_type", message=f"{key} is {shown(key, value)}, but true or false is needed")


def _judge_choice(key: str, value: Any, choices: tuple[str, ...]) -> ValueVerdict:
    if isinstance(value, bool) and "no" in choices:
        message = f"{key} is {word_of(value)}: YAML reads an unquoted no, off, yes or on as a truth value"
        usable = None if value else "no"
        return ValueVerdict(
            usable=usable, code="bool_as_string", message=message, fix=f'{key}: "no"' if not value else None, repair=not value
        )
    if isinstance(value, str) and value not in choices:
        replacement = GONE_VALUES.get(key, {}).get(value)
        if replacement in choices:
            message = f"{key}: {value} is gone from the installed transformers"
            return ValueVerdict(usable=replacement, code="removed_value", message=message, fix=f"{key}: {replacement}", repair=True)
        if UNRESOLVED.search(value):
            return ValueVerdict(
                usable=None, code="unresolved", severity="warning", message=f"{key} is {shown(key, value)}, to be filled in elsewhere"
            )
        near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.6)
        fix = f"{key}: {near[0]}" if near else f"one of {', '.join(choices[:8])}{', ...' if len(choices) > 8 else ''}"
        return ValueVerdict(
            usable=None, code="unknown_value", message=f"{key} is {shown(key, value)}, which TrainingArguments does not know", fix=fix
        )
    if not isinstance(value, str):
        return ValueVerdict(usable=value if isinstance(value, list) else None)
    return ValueVerdict(usable=value)


def _wrong_type(key: str, value: Any, kinds: frozenset[str]) -> ValueVerdict:
    words = {"str": "text", "dict": "a mapping", "list": "a list", "bool": "true or false"}
    wanted = " or ".join(words[kind] for kind in sorted(kinds) if kind in words)
    kind = words.get(type(value).__name__, type(value).__name__)
    return ValueVerdict(usable=None, code="wrong_type", severity="warning", message=f"{key} is {kind}, but {wanted} is needed")


def _number(text: str) -> int | float | None:
    text = text.strip().replace("_", "")
    if len(text) > 60:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def spelled_float(text: str, number: float) -> str:
    """A float as PyYAML reads it, in the writer's own digits where they can stay: 5e-5 -> 5.0e-5."""
    match = re.fullmatch(r"([-+]?\d+)(\.\d*)?[eE]([-+]?)(\d+)", text.strip())
    if match is not None and float(text) == number:
        return f"{match[1]}{match[2] if match[2] and match[2] != '.' else '.0'}e{match[3] or '+'}{match[4]}"
    written = repr(number)
    return spelled_float(written, number) if "e" in written else written


def _spelled(text: str, number: int | float) -> str:
    return spelled_float(text, number) if isinstance(number, float) else str(number)


def word_of(value: bool) -> str:
    return "true" if value else "false"


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type: 1, 1.0 and true are three different things in a config, and nan is nan."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))
