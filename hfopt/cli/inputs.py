"""What commands are given: a config (or just a model) with overrides, and the card that is there or was named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hfopt.errors import ConfigError, HardwareError
from hfopt.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from hfopt.config.load import Loaded
    from hfopt.schema import Hardware, Task, TrainJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the command line says instead of the config."""

    model: str | None = None
    task: str | None = None
    seq_len: int | None = None
    section: str | None = None
    trust_remote_code: bool = False


def read_job(config: str, overrides: Overrides, *, world_size: int = 1) -> TrainJob:
    """The job of a YAML; a model folder, a config.json or a hub id is a job with the Trainer's defaults."""
    job = model_job(config) if names_a_model(config) else _job_of(config, overrides.section, world_size)
    return overridden(job, overrides)


def overridden(job: TrainJob, overrides: Overrides) -> TrainJob:
    model, data = job.model, job.data
    if overrides.model is not None:
        model = replace(model, name=overrides.model)
    if overrides.task is not None:
        model = replace(model, task=_task(overrides.task))
    if overrides.trust_remote_code:
        model = replace(model, trust_remote_code=True)
    if overrides.seq_len is not None:
        data = replace(data, max_length=overrides.seq_len)
    return replace(job, model=model, data=data)


def names_a_model(config: str) -> bool:
    """Not a YAML file: a folder, a config.json, code (`file.py:factory`), or a name that is no file at all."""
    path = Path(config).expanduser()
    if path.suffix.lower() in (".yaml", ".yml") or config == "-":
        return False
    return path.is_dir() or path.suffix == ".json" or not path.exists()


def model_job(name: str) -> TrainJob:
    from hfopt.schema import DataSpec, ModelSpec, TrainJob

    return TrainJob(
        path=None,
        section=(),
        trainer="Trainer",
        args={},
        model=ModelSpec(name=name),
        data=DataSpec(),
        per_device_batch=8,  # TrainingArguments' default
        accumulation=1,
    )


def read_hardware(gpu: str | None, vram: str | None, *, count: int = 1) -> Hardware:
    """The named card, any card of that size, or what this machine has."""
    from hfopt.hardware.detect import detect, named
    from hfopt.hardware.host import host
    from hfopt.schema import Gpu, Hardware

    memory_bytes = _memory(vram)
    if gpu is not None:
        return named(gpu, count=count, memory_bytes=memory_bytes)
    if memory_bytes is not None:
        card = Gpu(name=f"a card of {format_bytes(memory_bytes)}", memory_bytes=memory_bytes)
        return Hardware(gpus=(card,) * count, host=host(), hypothetical=True)
    return detect()


def _memory(vram: str | None) -> int | None:
    if vram is None:
        return None
    try:
        size = parse_bytes(vram, default_unit="G")
    except ValueError as error:
        raise HardwareError(f"--vram {error}") from None
    if size <= 0:
        raise HardwareError(f"--vram {vram}: a card has more than no memory")
    return size


def _job_of(config: str, section: str | None, world_size: int) -> TrainJob:
    from hfopt.config.load import load

    loaded = load(Path(config), section=section, world_size=world_size)
    if loaded.job is None:
        raise ConfigError(f"{config}: {_first_error(loaded)}", hint=f"hfopt check {config} says everything that is wrong with it")
    return loaded.job


def _first_error(loaded: Loaded) -> str:
    errors = [problem for problem in loaded.problems if problem.severity == "error"]
    if not errors:
        return "nothing says which of its sections counts; name one with --section"
    first = errors[0]
    return f"line {first.place.line}: {first.message}" if first.place else first.message


def _task(name: str) -> Task:
    from hfopt.schema import Task

    for task in get_args(Task):
        if name.lower().replace("-", "_") == task:
            return task  # type: ignore[no-any-return]
    raise ConfigError(f"there is no task {name!r}", hint=f"tasks are: {', '.join(get_args(Task))}")
