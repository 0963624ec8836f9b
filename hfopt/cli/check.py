"""`hfopt check`: what is wrong or outdated in a config for the installed transformers, and the same file upgraded."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfopt.cli.options import Section
from hfopt.cli.output import people, write_out
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.config.read_job import Loaded
    from hfopt.config.yaml_edit import Edited
    from hfopt.schema import Problem, TrainJob

_COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def check(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TrainingArguments YAML, or - for standard input.")],
    section: Section = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Write the config, repaired where it can be, to stdout or -o FILE.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there; may be CONFIG itself.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON on stdout.")] = False,
    world_size: Annotated[int, typer.Option("--world-size", min=1, help="Number of data-parallel processes.")] = 1,
) -> None:
    """Say what is wrong or outdated in a config, with the lines. Exit code 1 if there is anything.

    \b
    Examples:
      hfopt check train.yaml                            every finding, with line and fix
      hfopt check train.yaml --upgrade -o train.yaml    repair what can be, in place
      hfopt check all.yaml --section profiles.large     one section of many
      cat train.yaml | hfopt check - --json             for a program
    """
    from hfopt.config.read_job import load_bytes

    if upgrade and as_json and output is None:
        raise ConfigError("--upgrade and --json both write to stdout", hint="add -o FILE for the upgraded config")
    if output is not None and not (upgrade or as_json):
        raise ConfigError("-o needs something to write", hint="add --upgrade or --json")
    source, name = _read(config)
    loaded = _with_gradients(load_bytes(source, name, section=section, world_size=world_size))
    edited = _upgraded(loaded) if upgrade else None
    if as_json:
        text = json.dumps(_as_data(loaded), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_out(text.encode(), None if upgrade else output)
    else:
        _tell(loaded, edited)
    if edited is None:
        raise typer.Exit(1 if _findings(loaded) else 0)
    write_out(edited.data, output, like=Path(config))
    raise typer.Exit(1 if _findings_left(edited, section, world_size) else 0)


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
    plain = job.trainer in ("Trainer", "Seq2SeqTrainer") and not job.args.get("label_smoothing_factor")
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


def _findings_left(edited: Edited, section: str | None, world_size: int) -> list[Problem]:
    from hfopt.config.read_job import load_document

    try:
        return _findings(load_document(edited.document, section=section, world_size=world_size))
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
        sys.stderr.write("".join("".join(words for words, _ in line) + "\n" for line in lines))
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
        lines.append(
            f"{loaded.document.path}: checked against transformers {loaded.transformers_version}; the effective batch cannot be told"
        )
    findings = _findings(loaded)
    if not findings:
        return [*lines, "no findings"]
    repaired = len(_repairable(loaded).intersection(findings))
    how = f"{repaired} repaired" if upgraded else f"`hfopt check --upgrade` repairs {repaired}"
    by_hand = f", {len(findings) - repaired} by hand" if len(findings) > repaired else ""
    return [*lines, f"{len(findings)} finding{'s' if len(findings) > 1 else ''}: {how}{by_hand}"]


def _repairable(loaded: Loaded) -> set[Problem]:
    return {item.problem for item in loaded.found if item.repair}


def _factors(loaded: Loaded) -> str:
    from hfopt.config.training_arguments import ACCUMULATION, BATCH

    job = loaded.job
    assert job is not None
    batch, accumulation = ("" if key in job.args else " (default)" for key in (BATCH, ACCUMULATION))
    world = f"{job.world_size} process{'es' if job.world_size > 1 else ''}"
    return f"{job.per_device_batch} per device{batch} × {job.accumulation} accumulation{accumulation} × {world}"


def _as_data(loaded: Loaded) -> dict[str, Any]:
    from hfopt.redact import scrub

    job, repairable = loaded.job, _repairable(loaded)
    batch = job and {
        "value": job.effective_batch,
        "per_device": job.per_device_batch,
        "accumulation": job.accumulation,
        "world_size": job.world_size,
    }
    data = {
        "path": loaded.document.path,
        "transformers": loaded.transformers_version,
        "section": ".".join(job.section) if job else None,
        "trainer": job.trainer if job else None,
        "effective_batch": batch,
        "arguments": dict(job.args) if job else None,
        "model": dataclasses.asdict(job.model) if job else None,
        "data": dataclasses.asdict(job.data) if job else None,
        "kept": sorted(job.kept) if job else [],
        "problems": [dataclasses.asdict(problem) | {"repairable": problem in repairable} for problem in loaded.problems],
    }
    return {key: scrub(value, key) for key, value in data.items()}
