"""Files of other tools (`accelerate config` among them) in the words of TrainingArguments: judged, read and written back by our own rules.

A tool's module (`axolotl`) says what its file means; here the values are compared with the installed TrainingArguments, each finding under
the key that the file has, and the job is put together.

Source: accelerate 1.15 (commands/config/config_args.py, utils/launch.py: the file becomes environment variables) and transformers 5.22
(training_args.py: the arguments' own fp16, bf16, `deepspeed` and `fsdp` come before what the environment says).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfopt.config.lookup import whole_number
from hfopt.config.other_tools import ToolSpelling
from hfopt.config.settings import with_raw
from hfopt.config.training_arguments import ACCUMULATION, BATCH, judge
from hfopt.config.validate import nearest
from hfopt.config.yaml_document import Document, parse, read_bytes
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import Installed
from hfopt.redact import is_secret
from hfopt.schema import Problem, TrainerKind, TrainJob

_CONVERTED = frozenset({"number_as_string", "bool_as_string"})  # their readers convert text by the field's type
_FOREIGN = frozenset({"unknown_value", "none_as_string", "removed_value"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Clash:
    """What the tool refuses to start with."""

    key: str
    message: str
    fix: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    tool: str
    args: Mapping[str, Any]  # by the names of TrainingArguments, with the tool's defaults
    spellings: Mapping[str, ToolSpelling]  # where each argument stands, or would be written
    facts: Mapping[str, Any]  # model and data in the words of TRL's scripts
    trainer: TrainerKind
    uses_trl: bool = False
    unwritable: frozenset[str] = frozenset()  # arguments the tool has no key for
    float32_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    clashes: tuple[Clash, ...] = ()
    read_keys: frozenset[str] = field(default_factory=frozenset)  # of the tool, that a misspelt one may stand for


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    args: Mapping[str, Any]
    problems: tuple[Problem, ...]


def judge_translation(made: Translation, document: Document, present: Installed) -> Judged:
    """The usable arguments, and what is wrong with the file under its own keys."""
    args: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in made.args.items():
        known = present.fields.get(name)
        if known is None:
            continue
        spelling = made.spellings.get(name)
        written = name if spelling is None else spelling.key
        verdict = judge(name, value, known)
        if verdict.usable is not None and not is_secret(written, verdict.usable):
            args[name] = verdict.usable
        if verdict.code is None or verdict.code in _CONVERTED or (verdict.code in _FOREIGN and name not in (BATCH, ACCUMULATION)):
            continue
        if document.root.find(written) is not None:
            message = verdict.message.replace(name, written)
            fix = verdict.fix and verdict.fix.replace(name, written)
            problems.append(_problem(document, written, verdict.severity, verdict.code, message, fix))
    problems += [_problem(document, clash.key, "error", "conflict", clash.message, clash.fix) for clash in made.clashes]
    problems += _misspelt(made, document, present)
    return Judged(args=args, problems=tuple(problems))


def _misspelt(made: Translation, document: Document, present: Installed) -> Iterator[Problem]:
    keys = [entry.key for entry in document.root.entries if entry.key]
    absent = made.read_keys - set(keys)
    for key in keys:
        if key in made.read_keys or key in present.fields:
            continue
        near = nearest(key, absent)
        if near is not None:
            message = f"{key} is not a key that {made.tool} is known to read"
            yield _problem(document, key, "warning", "unknown_key", message, f"did you mean {near}?")


def _problem(document: Document, key: str, severity: Any, code: str, message: str, fix: str | None) -> Problem:
    entry = document.root.find(key)
    place = document.place(entry.key_start if entry is not None else 0)
    return Problem(severity=severity, code=code, key=key, place=place, message=message, fix=fix)


_MARKS = ("distributed_type", "num_processes", "compute_environment", "mixed_precision")
_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "TPU", "XLA", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU")
_NOT_PLANNED = ("MEGATRON_LM", "TPU", "XLA", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_PARALLEL = {"parallelism_config_tp_size": "tp_size", "parallelism_config_cp_size": "cp_size", "parallelism_config_sp_size": "sp_size"}
_AUTOMATIC = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccelerateFile:
    processes: int | None  # on all machines; None: as many as there are
    machines: int
    arguments: Mapping[str, Any]  # by the names of TrainingArguments
    notes: tuple[str, ...] = ()

    @property
    def per_machine(self) -> int | None:
        return None if self.processes is None else max(1, self.processes // self.machines)


def read_accelerate_file(path: Path) -> AccelerateFile:
    data = parse(read_bytes(path), str(path)).resolved
    if sum(key in data for key in _MARKS) < 2:
        raise ConfigError(f"{path} is no file of `accelerate config`", hint="it has keys such as distributed_type and num_processes")
    kind = str(data.get("distributed_type") or "NO").upper().removeprefix("DISTRIBUTEDTYPE.")
    if kind not in _TYPES:
        raise ConfigError(f"{path}: distributed_type {kind} is not known", hint=f"one of {', '.join(_TYPES)}")
    if kind in _NOT_PLANNED:
        raise ConfigError(f"{path}: distributed_type {kind} is not planned", hint="planned are NO, MULTI_GPU, FSDP and DEEPSPEED")
    machines, processes = (_count(data, key, path) for key in ("num_machines", "num_processes"))
    precision, notes = _precision(data, path)
    arguments = {**precision, **_engine(data, kind, path), **_parallel(data)}
    if data.get("use_cpu") is True or kind == "MULTI_CPU":
        arguments["use_cpu"] = True
    compiled, compile_notes = _compiled(data)
    notes = (*notes, *compile_notes)
    return AccelerateFile(processes=processes, machines=machines or 1, arguments={**arguments, **compiled}, notes=notes)


def _count(data: Mapping[str, Any], key: str, path: Path) -> int | None:
    if data.get(key) in (None, -1):
        return None
    number = whole_number(data[key])
    if number is None or number < 1:
        raise ConfigError(f"{path}: {key} is {data[key]!r}; it must be a whole number of at least 1")
    return number


def _precision(data: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    stated = data.get("mixed_precision")
    word = "no" if stated in (None, False) else str(stated).lower()  # YAML reads an unquoted no as false
    if word not in _PRECISIONS:
        raise ConfigError(f"{path}: mixed_precision {stated!r} is not known", hint=f"one of {', '.join(_PRECISIONS)}")
    if word == "fp8":
        return {"bf16": True}, ("mixed_precision: fp8 is planned as bf16: float8 matmuls are not modelled",)
    return ({word: True} if word != "no" else {}), ()


def _compiled(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    section = data.get("dynamo_config")
    settings = {} if not isinstance(section, dict) else {str(key).removeprefix("dynamo_"): value for key, value in section.items()}
    backend, mode = (str(settings.get(key) or "").lower() for key in ("backend", "mode"))
    if backend in ("", "no"):
        return {}, ()
    found = {"torch_compile": True, "torch_compile_backend": backend, "torch_compile_mode": mode}
    notes = []
    if settings.get("use_regional_compilation") is True:
        notes.append("dynamo_use_regional_compilation: the step is planned as if the whole model were compiled at once")
    if settings.get("use_dynamic") is True:
        notes.append("dynamo_use_dynamic: the step is planned as compiled for one shape")
    return {key: value for key, value in found.items() if value not in ("", "default")}, tuple(notes)


def _engine(data: Mapping[str, Any], kind: str, path: Path) -> dict[str, Any]:
    if kind == "FSDP":
        config = _section(data, "fsdp_config", path)
        plain = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
        strategy = str(plain.get("sharding_strategy") or "FULL_SHARD").lower()
        words = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}.get(strategy, strategy)
        return {"fsdp": f"{words} auto_wrap", "fsdp_config": plain}
    if kind == "DEEPSPEED":
        config = _section(data, "deepspeed_config", path)
        if config.get("deepspeed_config_file"):
            return {"deepspeed": str(config["deepspeed_config_file"])}
        return {"deepspeed": _deepspeed(config)}
    return {}


def _section(data: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    found = data.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {key} is not a mapping of keys to values")
    return found


def _deepspeed(config: Mapping[str, Any]) -> dict[str, Any]:
    """As accelerate's DeepSpeedPlugin makes it of the file's keys."""
    stage = whole_number(config.get("zero_stage"))
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage, "reduce_bucket_size": "auto"}
    if zero["stage"] == 3:
        zero |= {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    for part, key in (("offload_optimizer", "offload_optimizer_device"), ("offload_param", "offload_param_device")):
        device = str(config.get(key) or "none").lower()
        if device != "none":
            zero[part] = {"device": device}
    stated = whole_number(config.get("gradient_accumulation_steps"))
    halves = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    return {"zero_optimization": zero, **halves, **_AUTOMATIC, "gradient_accumulation_steps": "auto" if stated is None else stated}


def _parallel(data: Mapping[str, Any]) -> dict[str, Any]:
    config = data.get("parallelism_config")
    if not isinstance(config, dict):
        return {}
    sizes = {name: whole_number(config.get(key, config.get(name))) for key, name in _PARALLEL.items()}
    found = {name: size for name, size in sizes.items() if size is not None and size > 1}
    return {"parallelism_config": found} if found else {}


def launched_by(job: TrainJob, file: AccelerateFile) -> tuple[TrainJob, tuple[str, ...]]:
    """The job with what accelerate brings: the arguments' own engine and precision come before it."""
    raw, found = job.raw, file.arguments
    skipped: set[str] = set()
    if raw.get("deepspeed") or job.settings.engine.fsdp is not None:
        skipped |= {"fsdp", "fsdp_config", "deepspeed"}
    if raw.get("bf16") is True or raw.get("fp16") is True:
        skipped |= {"bf16", "fp16"}
    brought = {key: value for key, value in found.items() if key not in skipped and raw.get(key) in (None, False)}
    overruled = sorted(key for key in skipped & found.keys() if raw.get(key) != found[key])
    notes = [f"{', '.join(overruled)}: the config's own setting comes before the accelerate file's"] if overruled else []
    return with_raw(job, {**raw, **brought}), (*file.notes, *notes)
