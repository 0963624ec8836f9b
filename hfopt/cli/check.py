"""`hfopt check`: what is wrong or outdated in a config for the installed transformers, and the same file upgraded."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hfopt.cli.json_output import json_text
from hfopt.cli.options import Accelerate, ForTransformers, Section
from hfopt.cli.output import people, remark, write_out
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hfopt.config.read_job import Loaded
    from hfopt.config.yaml_edit import Edited
    from hfopt.schema import Problem, TrainJob
    from hfopt.schema.outputs import BatchOutput, CheckedProblem, CheckOutput

FORMATS = ("text", "github", "sarif")
_TRAINING_KEY = re.compile(rb"^\s*-?\s*['\"]?(per_device_train_batch_size|gradient_accumulation_steps|num_train_epochs)\b", re.MULTILINE)
"""Keys that no other kind of YAML has: a file with one of them is meant for a Trainer, also where it cannot be read."""
_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def check(
    configs: Annotated[list[str], typer.Argument(metavar="CONFIG...", help="TrainingArguments YAMLs, or - for standard input.")],
    section: Section = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Write the config, repaired where it can be, to stdout or -o FILE.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there; may be CONFIG itself.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False,
    form: Annotated[str, typer.Option("--format", help="text, github (annotations of a workflow) or sarif (code scanning).")] = "text",
    only_configs: Annotated[bool, typer.Option("--only-configs", help="Skip files that hold no TrainingArguments.")] = False,
    fail_on: Annotated[str, typer.Option("--fail-on", help="error: warnings are shown, and the exit code stays 0.")] = "warning",
    world_size: Annotated[int | None, typer.Option("--world-size", min=1, help="Number of data-parallel processes.")] = None,
    accelerate: Accelerate = None,
    for_transformers: ForTransformers = None,
) -> None:
    """Say what is wrong or outdated in a config, with the lines. Exit code 1 if there is anything (see --fail-on).

    \b
    Examples:
      hfopt check train.yaml                            every finding, with line and fix
      hfopt check train.yaml --upgrade -o train.yaml    repair what can be, in place
      hfopt check all.yaml --section profiles.large     one section of many
      cat train.yaml | hfopt check - --json             for a program
      hfopt check --only-configs --format github *.yaml in a workflow; --format sarif -o found.sarif
    """
    from hfopt.config.read_job import load_bytes

    if form not in FORMATS:
        raise ConfigError(f"--format {form} is not known", hint=f"one of: {', '.join(FORMATS)}")
    if fail_on not in ("warning", "error"):
        raise ConfigError(f"--fail-on {fail_on} is not known", hint="one of: warning, error")
    world_size = world_size or _processes(accelerate)
    if form != "text" or only_configs or len(configs) > 1:
        if upgrade or as_json:
            raise ConfigError("--upgrade and --json take one config", hint="name one, without --format and --only-configs")
        raise typer.Exit(_check_all(configs, Checking(section, world_size, only_configs, for_transformers), form, output, fail_on))
    (config,) = configs
    if upgrade and as_json and output is None:
        raise ConfigError("--upgrade and --json both write to stdout", hint="add -o FILE for the upgraded config")
    if output is not None and not (upgrade or as_json):
        raise ConfigError("-o needs something to write", hint="add --upgrade, --json or --format sarif")
    source, name = _read(config)
    read = load_bytes(source, name, section=section, world_size=world_size, for_transformers=for_transformers)
    loaded = _with_gradients(read)
    edited = _upgraded(loaded) if upgrade else None
    if as_json:
        write_out(json_text("check", _as_data(loaded)).encode(), None if upgrade else output)
    else:
        _tell(loaded, edited)
    if edited is None:
        raise typer.Exit(_exit_code(loaded.problems, fail_on))
    write_out(edited.data, output, like=Path(config))
    raise typer.Exit(_exit_code(_findings_left(edited, section, world_size, for_transformers), fail_on))


class Checking(NamedTuple):
    """How each of several files is read."""

    section: str | None
    world_size: int
    only_configs: bool
    for_transformers: str | None = None


def _check_all(configs: list[str], how: Checking, form: str, output: Path | None, fail_on: str) -> int:
    """Every file; a file that cannot be read is a finding of its own. The exit code."""
    if output is not None and form == "text":
        raise ConfigError("-o needs something to write", hint="add --format sarif or --format github")
    read = [_checked(config, how) for config in configs]
    found = [(path, problem) for path, problems, _ in read for problem in problems]
    if form == "text":
        for path, problems, loaded in read:
            if loaded is not None:
                _tell(loaded, None)
            for problem in problems if loaded is None else ():
                remark(f"{path}: error: {problem.message}\n")
    else:
        from hfopt import __version__
        from hfopt.report.annotations import github_annotations, sarif

        text = github_annotations(found) if form == "github" else sarif(found, version=__version__)
        write_out(text.encode(), output)
    return _exit_code([problem for _, problem in found], fail_on)


def _exit_code(problems: Sequence[Problem], fail_on: str) -> int:
    severities = {problem.severity for problem in problems}
    return 1 if "error" in severities or (fail_on == "warning" and "warning" in severities) else 0


def _checked(config: str, how: Checking) -> tuple[str, tuple[Problem, ...], Loaded | None]:
    """(its name, what is wrong with it, what was read of it); nothing is wrong with what is passed over."""
    from hfopt.schema import Place, Problem

    source, name = _read(config)
    try:
        loaded = _with_gradients(_loaded(source, name, how))
    except ConfigError as error:
        if how.only_configs and not _TRAINING_KEY.search(source):
            return name, (), None
        message = str(error).removeprefix(f"{name}: ") + (f" ({error.hint})" if error.hint else "")
        place = Place(path=name, line=1, column=1)
        return name, (Problem(severity="error", code="unreadable", key=None, place=place, message=message),), None
    return name, loaded.problems, loaded


def _loaded(source: bytes, name: str, how: Checking) -> Loaded:
    from hfopt.config.read_job import load_bytes

    return load_bytes(source, name, section=how.section, world_size=how.world_size, for_transformers=how.for_transformers)


def _processes(accelerate: Path | None) -> int:
    if accelerate is None:
        return 1
    from hfopt.config.translation import read_accelerate_file

    return read_accelerate_file(accelerate).processes or 1


def _read(config: str) -> tuple[bytes, str]:
    from hfopt.config.yaml_document import MAX_BYTES, read_bytes

    if config != "-":
        return read_bytes(Path(config)), config
    source = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(source) > MAX_BYTES:
        raise ConfigError(f"standard input: larger than {MAX_BYTES >> 20} MiB: not a training config")
    return source, "<stdin>"


def _findings(loaded: Loaded) -> list[Problem]:
    return [problem for problem in loaded.problems if problem.severity != "note"]


def _with_gradients(loaded: Loaded) -> Loaded:
    """With the warning that a head ignores the accumulation, where the config accumulates and the model is known here."""
    from hfopt.config.training_arguments import ACCUMULATION
    from hfopt.facts import gradient_growth
    from hfopt.schema import Problem

    job = loaded.job
    named = None if job is None else _class_of(job)
    if job is None or named is None or gradient_growth.grows_with_accumulation(*named) is not True:
        return loaded
    message = gradient_growth.words(named[1], job.accumulation)
    fix = f"{job.per_device_batch * job.accumulation} × 1 where it fits; else trainer.model_accepts_loss_kwargs = False before train()"
    found = Problem(
        severity="warning", code="gradients_grow", key=ACCUMULATION, place=loaded.place_of(ACCUMULATION), message=message, fix=fix
    )
    return dataclasses.replace(loaded, problems=(*loaded.problems, found))


def _class_of(job: TrainJob) -> tuple[str, str] | None:
    """Model type and class of a job of the plain Trainer that accumulates, by what the file says and what is at hand."""
    from hfopt.errors import WorkloadError
    from hfopt.facts import gradient_growth
    from hfopt.model.sources import find_here

    spec = job.model
    plain = job.trainer in ("Trainer", "Seq2SeqTrainer") and not job.settings.label_smoothing
    if job.accumulation < 2 or spec.name is None or not plain:
        return None
    try:
        source = find_here(spec.name)
    except WorkloadError:
        return None
    model_type = None if source is None else source.fields.get("model_type")
    if source is None or not isinstance(model_type, str):
        return None
    task = spec.task or ("sequence_classification" if spec.num_labels is not None else None)
    name = gradient_growth.class_for(model_type, task) if task is not None else next(iter(source.fields.get("architectures") or ()), None)
    return None if name is None else (model_type, str(name))


def _upgraded(loaded: Loaded) -> Edited:
    from hfopt.config.yaml_edit import upgrade

    return upgrade(loaded)


def _findings_left(edited: Edited, section: str | None, world_size: int, for_transformers: str | None) -> list[Problem]:
    from hfopt.config.read_job import load_document

    try:
        return _findings(load_document(edited.document, section=section, world_size=world_size, for_transformers=for_transformers))
    except ConfigError:  # every key there was is gone: nothing is left to find
        return []


def _tell(loaded: Loaded, edited: Edited | None) -> None:
    """One line for each finding, as compilers write them, so that editors can jump there."""
    lines: list[list[tuple[str, str]]] = []
    for problem in loaded.problems:
        where = f"{problem.place.path}:{problem.place.line}:{problem.place.column}" if problem.place else loaded.document.path
        lines.append([(f"{where}: ", ""), (problem.severity, _COLOURS[problem.severity]), (f": {problem.message}", "")])
        if problem.fix is not None:
            lines.append([("    fix: ", "green"), (problem.fix, "")])
    for stale in edited.stale_comments if edited is not None else ():
        where = f"{stale.place.path}:{stale.place.line}:{stale.place.column}"
        lines.append([(f"{where}: the comment still states the old value {stale.old_value}: {stale.comment}", "")])
    lines.extend([(line, "")] for line in _summary(loaded, upgraded=edited is not None))
    _write(lines)


def _write(lines: list[list[tuple[str, str]]]) -> None:
    if not sys.stderr.isatty():  # no colours, so no need of rich, which takes longer to import than the config to read
        remark("".join("".join(words for words, _ in line) + "\n" for line in lines))
        return
    from rich.text import Text

    console = people()
    for line in lines:
        console.print(Text.assemble(*line))


def _summary(loaded: Loaded, *, upgraded: bool) -> list[str]:
    lines = []
    if loaded.job is not None:
        job = loaded.job
        where = f"section {'.'.join(job.section)}" if job.section else "the root"
        lines.append(
            f"{loaded.document.path}: {job.trainer} arguments in {where}, checked against transformers {loaded.transformers_version}"
        )
        lines.append(f"effective batch {job.effective_batch} = {_factors(loaded)}")
    else:
        lines.append(f"{loaded.document.path}: checked against transformers {loaded.transformers_version}; the effective batch is unknown")
    findings = _findings(loaded)
    if not findings:
        return [*lines, "no findings"]
    repaired = len(_repairable(loaded).intersection(findings))
    how = "" if not repaired else f"{repaired} repaired" if upgraded else f"`hfopt check --upgrade` repairs {repaired}"
    by_hand = f"{len(findings) - repaired} {'' if repaired else 'to repair '}by hand" if len(findings) > repaired else ""
    return [*lines, f"{len(findings)} finding{'s' if len(findings) > 1 else ''}: {', '.join(filter(None, (how, by_hand)))}"]


def _repairable(loaded: Loaded) -> set[Problem]:
    return {item.problem for item in loaded.found if item.repair}


def _factors(loaded: Loaded) -> str:
    from hfopt.config.training_arguments import ACCUMULATION, BATCH

    job = loaded.job
    assert job is not None
    batch, accumulation = ("" if key in job.raw else " (default)" for key in (BATCH, ACCUMULATION))
    world = f"{job.world_size} process{'es' if job.world_size > 1 else ''}"
    return f"{job.per_device_batch} per device{batch} × {job.accumulation} accumulation{accumulation} × {world}"


def _as_data(loaded: Loaded) -> dict[str, Any]:
    from hfopt.redact import scrub
    from hfopt.store import plain

    job, repairable = loaded.job, _repairable(loaded)
    batch: BatchOutput | None = (
        None
        if job is None
        else {
            "value": job.effective_batch,
            "per_device": job.per_device_batch,
            "accumulation": job.accumulation,
            "world_size": job.world_size,
        }
    )
    data: CheckOutput = {
        "path": loaded.document.path,
        "transformers": loaded.transformers_version,
        "section": ".".join(job.section) if job else None,
        "trainer": job.trainer if job else None,
        "effective_batch": batch,
        "arguments": dict(job.raw) if job else None,
        "model": job.model if job else None,
        "data": job.data if job else None,
        "kept": sorted(job.kept) if job else [],
        "problems": [_problem_data(problem, repairable=problem in repairable) for problem in loaded.problems],
    }
    return {key: scrub(value, key) for key, value in plain(data).items()}


def _problem_data(problem: Problem, *, repairable: bool) -> CheckedProblem:
    return {
        "severity": problem.severity,
        "code": problem.code,
        "key": problem.key,
        "place": problem.place,
        "message": problem.message,
        "fix": problem.fix,
        "repairable": repairable,
    }
