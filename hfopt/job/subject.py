"""What is planned: config, model, data and hardware, put together from a file and the options."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hfopt.compat.fast_import import lean_imports, spare_dynamo, spare_inductor, spare_scipy
from hfopt.compat.model_names import spare_other_models
from hfopt.compat.versions import attention_names, module_names
from hfopt.config.deepspeed_json import by_its_name, config_mapping, is_missing, zero_defaults
from hfopt.config.lookup import model_named_in, named_beside
from hfopt.config.read_job import Loaded, load, load_document
from hfopt.config.settings import fixed_by_deepspeed, model_parallel_of, sharding_of, with_raw
from hfopt.config.training_arguments import ACCUMULATION, ATTENTION, BATCH, trl_keys
from hfopt.config.translation import launched_by, read_accelerate_file
from hfopt.config.yaml_edit import repairs_of, upgrade
from hfopt.errors import ConfigError
from hfopt.facts.argument_effects import stand_in
from hfopt.facts.training_keys import installed
from hfopt.hardware.detect import detect, named
from hfopt.job.request import Request
from hfopt.memory.counted_step import FirstAnswer, first_answer
from hfopt.memory.trace_store import before_tracing, begin_tracing
from hfopt.model.sources import find_here
from hfopt.model.stored_workload import kept_workload
from hfopt.schema import Assumption, Change, DataSpec, Hardware, Problem, TrainJob, Workload
from hfopt.speed.calibration import NamedHost, named_host, with_host
from hfopt.store import default_store
from hfopt.units import GIB

USE_CPU = "use_cpu"  # of TrainingArguments; `no_cuda` is read as this


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is planned: everything the algorithm needs to know about the job."""

    job: TrainJob
    workload: Workload
    hardware: Hardware
    loaded: Loaded | None = None
    repairs: tuple[Change, ...] = ()  # what was outdated in the file
    dataset: Any = None  # the live training data, when there is one
    collate: Callable[[list[Any]], Any] | None = None
    most_workers: int | None = None  # what the data allows; None: as many as it takes
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what makes the file train otherwise than it seems, or not at all
    trainer: Any = None  # the live one
    named_host: NamedHost = field(default_factory=NamedHost)

    @property
    def assumed(self) -> tuple[Assumption, ...]:
        """The picture of the job, whole: the model and its batches, how much data there is, and the host that feeds it."""
        data = self.job.data
        count = f"{'at most ' if data.samples_at_most else ''}{data.samples} samples"
        size = Assumption(what="data size", value=None if data.samples is None else count, settle="--samples")
        host, away = self.hardware.host, self.hardware.hypothetical
        away = away and self.named_host.cores is None
        cores = f"of {host.cores:g} cores" + (" as here" if away else "")
        device = (Assumption(what="device", value=f"CPU ({USE_CPU}: true)"),) if self.job.settings.use_cpu else ()
        meant = self.job.for_transformers
        if meant is not None:
            device = (Assumption(what="transformers", value=f"{meant} for the file, {installed().version} for the figures"), *device)
        if self.job.guessed_trainer:
            device = (*device, Assumption(what="trainer", value=f"TRL's {self.job.trainer}Trainer", guessed=True, settle="method"))
        if self.loaded is not None and BATCH not in self.job.raw:
            size_of_batch = f"{self.job.per_device_batch}, the Trainer's own"
            device = (*device, Assumption(what="batch", value=size_of_batch, guessed=True, settle=BATCH))
        return (*device, *self.workload.assumed, size, Assumption(what="host", value=cores, guessed=away))

    @property
    def folder(self) -> Path | None:
        """Where the config stands, for the files it names."""
        return None if self.job.path is None else Path(self.job.path).parent


def hardware_of(request: Request) -> Hardware:
    """The named card, or what is here, beside the host that is named."""
    return with_host(_cards_of(request), named_host(request.host))


def _cards_of(request: Request) -> Hardware:
    memory = None if request.vram_gib is None else int(request.vram_gib * GIB)
    if request.gpu is not None:
        return named(request.gpu, count=request.num_gpus or 1, memory_bytes=memory)
    if memory is not None:
        return named("a card of that size", count=request.num_gpus or 1, memory_bytes=memory)
    found = detect()
    if request.num_gpus is not None and found.gpus:
        if request.num_gpus > len(found.gpus):
            raise ConfigError(
                f"--num-gpus {request.num_gpus}, but {len(found.gpus)} are here", hint="name the card with --gpu to plan for others"
            )
        return replace(found, gpus=found.gpus[: request.num_gpus])
    return found


Known = Callable[[TrainJob, Hardware, FirstAnswer | None], Workload | None]


def from_file(
    path: Path, request: Request, *, known: Known = lambda job, hardware, answer: None, begin: Callable[[], None] = lambda: None
) -> Subject:
    """The config, repaired where the installed transformers would refuse it, with its model and data.

    `known` hears of the job and what counting says of it before the model is looked at, which takes seconds of importing, and may say all
    that is needed of it; `begin` is called before anything is imported for it.
    """
    hardware = hardware_of(request)
    devices = max(1, len(hardware.gpus)) * request.nodes
    world = _data_parallel(devices, request.model_parallel)
    card = hardware.smallest
    has_bf16 = card is None or card.capability is None or card.supports("bf16")
    loaded = load(path, section=request.section, world_size=world, has_bf16=has_bf16)
    on_cpu = loaded.job is not None and loaded.job.settings.use_cpu
    if on_cpu and hardware.gpus:
        hardware, devices = replace(hardware, gpus=(), notes=()), request.nodes
        world = _data_parallel(devices, request.model_parallel)
        loaded = load(path, section=request.section, world_size=world)
    as_written = loaded
    loaded, repairs = _repaired(loaded, request.section, world)
    decisive, others = _errors(loaded, as_written)
    launch_notes: tuple[str, ...] = ()
    if loaded.job is not None and request.accelerate is not None:
        launched_job, launch_notes = launched_by(loaded.job, read_accelerate_file(request.accelerate))
        loaded = replace(loaded, job=launched_job)
    if loaded.job is None or decisive:
        lines = [f"{p.place.path}:{p.place.line}: {p.message}" if p.place else f"{path}: {p.message}" for p in decisive]
        fix = decisive[0].fix if len(decisive) == 1 else None
        raise ConfigError("\n".join(lines) or f"{path}: the batch size cannot be read", hint=fix or "`hfopt check` shows every fix")
    job, assumed = _with_deepspeed(asked(loaded.job, request), path.parent, request)
    if request.for_transformers is not None:
        loaded, repairs = _repaired(_reread(as_written, request, world), request.section, world, request.for_transformers)
        others = _errors(loaded, as_written)[1]
    _check_named(job, path)
    _check_attention(job)
    _check_targets(job)
    job, checkpointed = _as_fsdp_checkpoints(job, request, path.parent)
    if request.model_parallel == 1 and (sharing := model_parallel_of(job.settings.engine, path.parent)) > 1:
        job = replace(job, world_size=_data_parallel(devices, sharing))
    fixed = {} if request.engine is not None else fixed_by_deepspeed(job.settings.engine, path.parent)
    _check_agreement(job, fixed)
    job = replace(job, kept=job.kept | fixed.keys())
    with before_tracing(begin):
        workload = known(job, hardware, first_answer(job, hardware, request.headroom)) or workload_of(job, lean=request.own_process)
    about = (*as_written.unread, *launch_notes, *_other_optimizer(job), *checkpointed, *assumed, *_fixed(fixed))
    return Subject(
        job=job,
        workload=workload,
        hardware=hardware,
        loaded=loaded,
        repairs=repairs,
        notes=(*(_on_cpu(request) if on_cpu else ()), *about),
        warnings=(*others, *_misspelt(loaded)),
        named_host=named_host(request.host),
    )


def _other_optimizer(job: TrainJob) -> tuple[str, ...]:
    instead = stand_in(job.settings.optim)
    return () if instead is None else (f"optim: {job.settings.optim} is not modelled: {instead.why}",)


def _on_cpu(request: Request) -> tuple[str, ...]:
    asked_for = request.gpu or (None if request.vram_gib is None else "a card")
    beside = f"; {asked_for} is not used while it is set" if asked_for is not None else ""
    return (f"{USE_CPU}: true: the run computes on the CPU, so that is what is planned for{beside}",)


def _check_named(job: TrainJob, path: Path) -> None:
    """A config that keeps its model in the file beside it is answered with that file."""
    if job.model.name is None and job.model.like is None and not job.model.overrides and (beside := named_beside(path)) is not None:
        raise ConfigError(
            f"{path} names no model", hint=f"{beside[0].name} beside it names {beside[1]}: --model-from {shlex.quote(str(beside[0]))}"
        )


def _check_attention(job: TrainJob) -> None:
    """Before the seconds of importing what would refuse it; a name with an owner is a kernel of the Hub."""
    name, known = job.model.attn_implementation, attention_names()
    if name is not None and known and "/" not in name and name.removeprefix("paged|") not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"{ATTENTION}: {name} is not known to transformers {installed().version}",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}",
        )


def _check_targets(job: TrainJob) -> None:
    """peft refuses targets of which the model has none, but only once it is built. A model of several parts has those of other files."""
    targets, name = job.model.lora.target_modules if job.model.lora is not None else None, job.model.name
    source = find_here(name) if isinstance(targets, tuple) and name is not None and not Path(name).expanduser().exists() else None
    fields = {} if source is None else source.fields
    known = frozenset[str]() if any(key.endswith("_config") for key in fields) else module_names(str(fields.get("model_type")))
    if not known or not targets or any(target.rpartition(".")[2] in known for target in targets):
        return
    meant = {near[0]: None for target in targets if (near := difflib.get_close_matches(target, known, n=1))}
    raise ConfigError(
        f"LoRA: {name} has no module called {' or '.join(targets)}",
        hint=f"did you mean {', '.join(meant)}?" if meant else "name its linear layers in target_modules, or use all-linear",
    )


def _as_fsdp_checkpoints(job: TrainJob, request: Request, folder: Path) -> tuple[TrainJob, tuple[str, ...]]:
    """`activation_checkpointing` in the fsdp_config: it stays as it is, for beside it transformers refuses the Trainer's own."""
    engine, own = job.settings.engine, "gradient_checkpointing"
    if job.world_size < 2 or engine.fsdp is None or (request.engine or "fsdp")[:4] != "fsdp":
        return job, ()
    if config_mapping(engine.fsdp_config or {}, "fsdp_config", folder).get("activation_checkpointing") not in (True, "true", "True"):
        return job, ()
    if job.raw.get(own) is True and job.tool is None:
        raise ConfigError(
            f"{own} and the fsdp_config's activation_checkpointing are both true: transformers refuses to start", hint=f"drop {own}"
        )
    kept = replace(job, kept=job.kept | {own, "activation_checkpointing", f"{own}_kwargs"})
    note = (
        "the fsdp_config's activation_checkpointing stays: accelerate recomputes blocks with other random numbers, so only without dropout"
    )
    return with_raw(kept, {**job.raw, own: True, f"{own}_kwargs": {"use_reentrant": False}}), (note,)


def _with_deepspeed(job: TrainJob, folder: Path, request: Request) -> tuple[TrainJob, tuple[str, ...]]:
    """Where its JSON cannot be found: the stage asked for, the one its name says, or none on one device."""
    value = job.raw.get("deepspeed")
    without = {key: item for key, item in job.raw.items() if key != "deepspeed"}
    if value and job.world_size == 1 and job.model.quantization is not None:
        return with_raw(job, without), ("planned without DeepSpeed: an adapter on packed weights holds little that it would divide",)
    if not value or not is_missing(value, folder):
        return job, _on_one_device(job, folder)
    if request.assume_zero is not None:
        stated = with_raw(job, {**job.raw, "deepspeed": zero_defaults(request.assume_zero)})
        note = f"deepspeed: {value} is not there: planned as ZeRO-{request.assume_zero} with DeepSpeed's defaults (--assume-zero)"
        return stated, (note, *_on_one_device(stated, folder))
    if (described := by_its_name(value)) is not None:
        stated = with_raw(job, {**job.raw, "deepspeed": described})
        stage = described["zero_optimization"]["stage"]
        note = f"deepspeed: {value} is not there: planned as ZeRO-{stage} by its name, with DeepSpeed's defaults (--assume-zero)"
        return stated, (note, *_on_one_device(stated, folder))
    if job.world_size > 1 and request.engine is None:
        return job, ()
    note = f"deepspeed: {value} is not there: planned without it; --assume-zero STAGE counts DeepSpeed's float32 copies of what trains"
    return with_raw(job, without), (note,)


def _on_one_device(job: TrainJob, folder: Path) -> tuple[str, ...]:
    sharding = sharding_of(job.settings.engine, world_size=job.world_size, folder=folder) if job.world_size == 1 else None
    if sharding is None:
        return ()
    stage = sharding.engine.removeprefix("zero")
    return (f"DeepSpeed ZeRO-{stage} on one device divides nothing; its float32 copies of what trains and its buffers are in the figures",)


DECISIVE = frozenset(
    {
        *(BATCH, ACCUMULATION, "fp16", "bf16", "optim", "gradient_checkpointing", "gradient_checkpointing_kwargs", "fsdp", "fsdp_config"),
        *("deepspeed", "num_generations", "generation_batch_size", "steps_per_generation", "label_smoothing_factor", "torch_compile"),
        *("train_sampling_strategy", "auto_find_batch_size"),
    }
)
"""Keys that the plan rests on: an error in one of them stops it; any other is a warning."""


def _reread(loaded: Loaded, request: Request, world_size: int) -> Loaded:
    """The file as the transformers will read it that it is written for."""
    return load_document(loaded.document, section=request.section, world_size=world_size, for_transformers=request.for_transformers)


def _repaired(
    loaded: Loaded, section: str | None, world_size: int, for_transformers: str | None = None
) -> tuple[Loaded, tuple[Change, ...]]:
    """The file repaired, and what that changed. Facts about the data are those of the file as it was: a dropped key still says them."""
    if not any(item.repair for item in loaded.found):
        return loaded, ()
    repaired = load_document(upgrade(loaded).document, section=section, world_size=world_size, for_transformers=for_transformers)
    if loaded.job is not None and repaired.job is not None:
        dropped = {key: value for key, value in loaded.job.raw.items() if key in trl_keys(loaded.job.trainer)}
        job = with_raw(replace(repaired.job, data=loaded.job.data), {**dropped, **repaired.job.raw})
        repaired = replace(repaired, job=job)
    return repaired, repairs_of(loaded, repaired.document)


def _errors(loaded: Loaded, as_written: Loaded) -> tuple[list[Problem], tuple[str, ...]]:
    """Those that stop a plan, and the others as warnings; their lines are those of the file as it is, whose keys a repair may drop."""
    places = {(problem.code, problem.key): problem.place for problem in as_written.problems if problem not in as_written.aside}
    ours = (problem for problem in loaded.problems if problem not in loaded.aside)
    left = [replace(problem, place=places.get((problem.code, problem.key), problem.place)) for problem in ours]
    errors = [problem for problem in left if problem.severity == "error"]
    names = DECISIVE | {home.key for key, home in loaded.homes.items() if key in DECISIVE}
    decisive = [problem for problem in errors if problem.key is None or problem.key in names]
    others = [problem for problem in errors if problem not in decisive]
    others += [
        problem for problem in left if problem.code in ("not_divisible", "hydra", "builds_on")
    ]  # of the devices named; of files not read
    return decisive, tuple(dict.fromkeys(f"line {p.place.line}: {p.message}" if p.place else p.message for p in others))


def _check_agreement(job: TrainJob, fixed: Mapping[str, Any]) -> None:
    """transformers compares the DeepSpeed config with its arguments and refuses to start where they differ."""
    ours = {
        "per_device_train_batch_size": job.per_device_batch,
        "gradient_accumulation_steps": job.accumulation,
        "train_batch_size": job.effective_batch,
        "bf16": job.settings.precision == "bf16",
        "fp16": job.settings.precision == "fp16",
    }
    for key, value in ours.items():
        if fixed.get(key, value) != value:
            raise ConfigError(
                f"{key}: the DeepSpeed config says {fixed[key]}, the training arguments {value}: transformers refuses to start",
                hint='write "auto" in the DeepSpeed config, and the arguments decide',
            )


def _fixed(fixed: Mapping[str, Any]) -> tuple[str, ...]:
    stated = [key for key in fixed if key not in ("optim", "train_batch_size")]
    return (f'the DeepSpeed config states {", ".join(stated)}: not changed; with "auto" there they are planned',) if stated else ()


def _misspelt(loaded: Loaded) -> tuple[str, ...]:
    """Keys that say nothing as they are written: one of them may be half of the effective batch."""
    found = (problem for problem in loaded.problems if problem.code == "unknown_key" and problem.fix is not None)
    return tuple(dict.fromkeys(f"{problem.message}: {problem.fix}" for problem in found))


def _data_parallel(devices: int, sharing: int) -> int:
    """Ranks that see samples of their own: those that share a model's layers or a sequence's parts count once."""
    if devices % sharing:
        raise ConfigError(
            f"{devices} devices cannot be split into groups of {sharing} that share their samples",
            hint="tensor × sequence × context parallel sizes must divide the number of devices",
        )
    return devices // sharing


def asked(job: TrainJob, request: Request) -> TrainJob:
    """The job with what the command line says instead of the file."""
    model = job.model
    if request.model_from is not None:
        model = replace(model, name=model_named_in(request.model_from))
    if request.model is not None:
        model = replace(model, name=request.model)
    if request.like is not None:
        model = replace(model, like=request.like)
    if request.task is not None:
        model = replace(model, task=request.task)
    if request.trust_remote_code:
        model = replace(model, trust_remote_code=True)
    data: DataSpec = job.data if request.seq_len is None else replace(job.data, max_length=request.seq_len)
    if request.lengths:
        data = replace(data, lengths=request.lengths)
    if request.samples is not None:
        data = replace(data, samples=request.samples, samples_at_most=False)
    return replace(job, model=model, data=data, kept=job.kept | request.keep, for_transformers=request.for_transformers)


def workload_of(job: TrainJob, *, layers: int | None = None, lean: bool = False) -> Workload:
    """`layers`: with another number of blocks, where they are all alike. `lean`: nothing else here needs transformers whole."""
    if layers is not None:
        return _built(job, layers=layers)
    return kept_workload(job, partial(_built, lean=lean), default_store(), before_building=begin_tracing)


def _built(job: TrainJob, *, layers: int | None = None, lean: bool = False) -> Workload:
    with lean_imports() if lean else nullcontext():
        if lean:
            spare_dynamo(one_device=job.world_size == 1)
            spare_other_models()
            spare_scipy(one_device=job.world_size == 1)
            if job.model.lora is not None or job.model.quantization is not None:
                spare_inductor()
        from hfopt.model.from_config import from_job

        made = from_job(job, layers=layers)
    grouped = job.settings.loader.groups_by_length
    return replace(made, lengths=replace(made.lengths, grouped=True)) if grouped and made.lengths is not None else made
