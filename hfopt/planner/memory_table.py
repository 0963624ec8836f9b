"""Memory by batch size: the table of `hfopt estimate`, and the points that the page of a plan draws.

Nothing is traced for a chart: a curve is drawn where the search made its trace. The step is thinned to a few hundred moments, of which
each is the highest of those it stands for, so that the peak is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hfopt.compat.versions import missing_kernels, torch_build
from hfopt.config.settings import trainer_settings
from hfopt.config.training_arguments import BATCH
from hfopt.errors import ConfigError, TraceError
from hfopt.facts.argument_effects import not_modelled
from hfopt.facts.training_keys import installed
from hfopt.job.request import Progress, Request
from hfopt.job.subject import Subject, asked, from_file, hardware_of, workload_of
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.timeline import live_over_time
from hfopt.planner.choices import attention_note, current_candidate, liger_note
from hfopt.planner.engines import named_engine, subject_on
from hfopt.planner.search import Space, micro_batches
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.compiled import compile_assumed, compile_note, uncollected_note
from hfopt.pricing.evaluation_choice import (
    NOT_ESTIMATED,
    EvaluationReading,
    InterruptedTraining,
    eval_batch_of,
    evaluation_peak,
    read_evaluation,
    trace_evaluation,
)
from hfopt.pricing.grpo import colocated_vllm, evaluation_notes, held_words, room_beside
from hfopt.pricing.target_device import allocator_note, memory_pricing
from hfopt.schema import (
    BatchPoint,
    BatchShape,
    Candidate,
    Checkpointing,
    DataSpec,
    EvaluationPeak,
    Gpu,
    MemoryPeak,
    MemoryRow,
    MemoryTable,
    ModelSpec,
    PlanCharts,
    Precision,
    StepSettings,
    TimelinePoint,
    TrainJob,
    Workload,
)
from hfopt.units import divisors

MOMENTS = 240
BEYOND = 4  # times the effective batch that the curves go on where memory allows, to show what is left unused


def charts(pricing: Pricing, space: Space, winner: Candidate, gpu: Gpu | None) -> PlanCharts:
    timeline = _timeline(pricing.curve(winner), winner.per_device_batch)
    return PlanCharts(
        timeline=timeline,
        peak=max(timeline, key=lambda point: point.total_bytes, default=None),
        batches=tuple(_by_batch(pricing, space, winner)),
        device_bytes=None if gpu is None else gpu.usable_bytes or gpu.memory_bytes,
        budget_bytes=pricing.budget_bytes,
    )


def _timeline(curve: MemoryCurve, batch: int) -> tuple[TimelinePoint, ...]:
    """The step that holds the peak, which is the last one: the first has no optimizer state yet."""
    import numpy as np

    timeline = curve.timeline.at(batch)
    live = live_over_time(timeline, batch)
    total = np.sum(list(live.values()), axis=0)
    starts = sorted(event for name, event in timeline.marks.items() if name.startswith("step_"))
    first = max((start for start in starts if start <= int(np.argmax(total))), default=0)
    after = min((start for start in starts if start > first), default=len(timeline))
    end = first + int(np.flatnonzero(~timeline.is_free[first:after])[-1]) + 1  # what is let go after that is the end of the trace
    edges = np.unique(np.linspace(first, end, min(MOMENTS, end - first) + 1).astype(int))
    highest = [low + int(np.argmax(total[low:high])) for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    taking = np.maximum.accumulate(np.where(timeline.is_free, 0, np.arange(len(timeline))))  # the place of a free is that of what ran last
    points = []
    for event in highest:
        place = timeline.places[int(timeline.place_of[taking[event]])]
        held = {kind: int(values[event]) for kind, values in live.items()}
        points.append(
            TimelinePoint(
                position=(event - first) / max(1, end - first - 1),
                bytes_by_category={**held, "context": curve.context_bytes},
                moment=", ".join(part for part in (place.phase, place.module, place.op) if part),
                phase=place.phase,
            )
        )
    return tuple(points)


def _by_batch(pricing: Pricing, space: Space, winner: Candidate) -> Iterator[BatchPoint]:
    per_device = space.effective_batch // space.world_size
    choosable = set(micro_batches(space))
    for checkpointing in dict.fromkeys((Checkpointing(), *space.checkpointings, winner.checkpointing)):
        setting = replace(winner, checkpointing=checkpointing)
        if not pricing.known(setting):
            continue
        limit = pricing.known_limit(setting) or 0
        batches = sorted({*divisors(per_device), *_round_batches(max(per_device, min(2 * limit, BEYOND * per_device)))})
        for batch, device_bytes in zip(batches, pricing.nearest_device_bytes(setting, batches), strict=True):
            point = replace(setting, per_device_batch=batch, accumulation=max(1, round(per_device / batch)))
            chosen = point == winner
            yield BatchPoint(
                batch=batch,
                checkpointing=checkpointing.on,
                every_n_layers=checkpointing.every_n_layers,
                device_bytes=pricing.memory(winner).device_bytes if chosen else device_bytes,
                samples_per_s=pricing.time(point).samples_per_s,
                fits=batch <= limit,
                may_be_chosen=batch in choosable and checkpointing in space.checkpointings,
                chosen=chosen,
            )


def _round_batches(largest: int) -> Iterable[int]:
    """1, 2, 3, 4, 6, 8, 12, ...: two per doubling."""
    batch = 1
    while batch <= largest:
        yield batch
        if 2 < 3 * batch <= 2 * largest:
            yield 3 * batch // 2
        batch *= 2


_ENGINE_WORDS = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
_MOST_ROWS = 6  # per checkpointing, when no sizes are asked for


def read_subject(config: str, request: Request) -> Subject:
    """What a YAML says; a model folder, a config.json, a hub id or `file.py:factory` is a job with the Trainer's defaults."""
    path = Path(config).expanduser()
    if path.suffix.lower() in (".yaml", ".yml") or (path.is_file() and path.suffix != ".json"):
        return from_file(path, request)
    hardware = hardware_of(request)
    job = TrainJob(
        path=None,
        section=(),
        trainer="Trainer",
        raw={},
        settings=trainer_settings({}),
        model=ModelSpec(name=config),
        data=DataSpec(),
        per_device_batch=installed().fields[BATCH].default,
        accumulation=1,
        world_size=max(1, len(hardware.gpus)),
    )
    job = asked(job, request)
    return Subject(job=job, workload=workload_of(job), hardware=hardware)


def with_engine(subject: Subject, request: Request) -> Subject:
    """The job with the keys of the engine that was asked for; without one it is the config's own, else DDP."""
    if request.engine is None:
        return subject
    engine = named_engine(request.engine)
    if subject.job.world_size < 2:
        raise ConfigError(f"--engine {request.engine} is for several devices", hint="say how many with --num-gpus")
    return subject_on(engine, subject)


def memory_table(
    subject: Subject,
    request: Request,
    *,
    precision: Precision | None = None,
    batch_sizes: Sequence[int] = (),
    progress: Progress = lambda text: None,
) -> MemoryTable:
    """Traces the step with and without checkpointing, as `plan` does, and prices the batch sizes."""
    job, workload, gpu = subject.job, subject.workload, subject.hardware.smallest
    pricing = memory_pricing(subject, request, progress)
    own = current_candidate(subject)
    own = replace(own, precision=precision or own.precision)
    ways, notes = [Checkpointing()], []
    if workload.checkpointable:
        ways.append(job.settings.checkpointing_when_on)
    elif own.checkpointing.on:
        own = replace(own, checkpointing=Checkpointing())
        notes.append(f"{workload.model_class} has no gradient checkpointing: the setting is left out")
    settings = replace(pricing.base, precision=own.precision, checkpointing=own.checkpointing)
    notes = [*_notes(subject, settings), *notes]
    rows: list[MemoryRow] = []
    evaluation: EvaluationPeak | None = None
    largest: dict[bool, int | None] = {}
    vllm = colocated_vllm(job, gpu)
    available = None if gpu is None else room_beside(vllm, gpu.available_bytes, gpu)
    notes += [] if vllm is None else [held_words(vllm)]
    notes += evaluation_notes(subject, job.per_device_batch)
    reading = read_evaluation(subject)
    seconds = 0.0
    for way in ways:
        candidate = replace(own, checkpointing=way)
        result = pricing.estimate(candidate)
        seconds += result.seconds
        notes += [note for note in result.notes if note not in notes]
        progress("replaying the allocator …")
        room = None if available is None else available - pricing.added_bytes(candidate)
        largest[way.on] = pricing.curve(candidate).largest_batch(room, giving_back=True) if room is not None else None
        if way == own.checkpointing and reading is not None:
            evaluation = _evaluation(subject, reading, pricing, candidate, room, notes)
        for size in batch_sizes or _usual_sizes(job.per_device_batch, largest[way.on], has_card=available is not None):
            is_asked = size == job.per_device_batch and way == own.checkpointing
            rows.append(_row(pricing, replace(candidate, per_device_batch=size), available, is_asked=is_asked))
    compiled = pricing.compiled(own)
    notes += uncollected_note(compiled, own.per_device_batch, pricing.memory(own)) if compiled is not None else ()
    assumed = (*subject.assumed, *(() if vllm is None else vllm.assumed), *(() if reading is None else reading.assumed))
    return MemoryTable(
        model=workload.name,
        model_class=workload.model_class,
        parameters=workload.parameters,
        trainable_parameters=workload.trainable_parameters,
        device=gpu,
        available_bytes=available,
        settings=settings,
        sample=_sample(workload.shape),
        rows=tuple(rows),
        largest=largest,
        seconds=seconds,
        assumed=(*assumed, *((compile_assumed(compiled),) if own.torch_compile else ())),
        notes=tuple(notes),
        evaluation=evaluation,
    )


def _notes(subject: Subject, settings: StepSettings) -> Iterator[str]:
    """What the figures leave out or take for granted, before anything is traced."""
    job, gpu = subject.job, subject.hardware.smallest
    kernels = missing_kernels(gpu, torch_build())
    if kernels is not None:
        yield str(kernels)
    yield from (*subject.hardware.notes, *subject.notes, *subject.warnings)
    yield from (repair.reason for repair in subject.repairs)
    yield from (*not_modelled(job.raw, job.trainer, ranks=job.world_size), *liger_note(subject), *attention_note(subject, gpu))
    if job.settings.torch_compile:
        yield from compile_note(subject, gpu)
    yield from _remarks(subject.workload, settings, gpu)


def _evaluation(
    subject: Subject, reading: EvaluationReading, pricing: Pricing, candidate: Candidate, room: int | None, notes: list[str]
) -> EvaluationPeak | None:
    """The first one, after the config's own training; a note says why there is none."""
    notes += reading.notes
    candidate = replace(candidate, torch_compile=False)  # an evaluation is traced eagerly, after an eager training
    training = pricing.curve(candidate)
    allowed = None if room is None else room - training.context_bytes
    interrupted = InterruptedTraining(curve=training, batch=subject.job.per_device_batch, room_bytes=allowed)
    try:
        curve = trace_evaluation(subject, reading, *pricing.traced_as(pricing.settings(candidate)))
    except TraceError as error:
        notes.append(f"{NOT_ESTIMATED}: {error}")
        return None
    return evaluation_peak(curve, interrupted, reading.settings, eval_batch_of(subject))


def _row(pricing: Pricing, candidate: Candidate, available: int | None, *, is_asked: bool) -> MemoryRow:
    """On a card that is nearly full the allocator gives cached blocks back, so what fits is replayed within the card's limit."""
    peak, way = pricing.memory(candidate), candidate.checkpointing
    if available is None:
        return MemoryRow(peak=peak, checkpointing=way, fits=None, spare_bytes=None, asked=is_asked)
    curve, added = pricing.curve(candidate), pricing.added_bytes(candidate)
    fits = curve.fits(peak.batch, available - added, giving_back=True)
    if fits and peak.device_bytes > available:
        peak = _within(peak, curve.replay(peak.batch, capacity_bytes=available - added - peak.context_bytes).reserved_bytes + added)
    return MemoryRow(peak=peak, checkpointing=way, fits=fits, spare_bytes=available - peak.device_bytes, asked=is_asked)


def _within(peak: MemoryPeak, reserved_bytes: int) -> MemoryPeak:
    given_back = peak.reserved_bytes - reserved_bytes
    breakdown = peak.breakdown
    if breakdown is not None:
        breakdown = replace(breakdown, fragmentation_bytes=breakdown.fragmentation_bytes - given_back)
    return replace(peak, reserved_bytes=reserved_bytes, breakdown=breakdown)


def _usual_sizes(configured: int, largest: int | None, *, has_card: bool) -> list[int]:
    """The config's batch and powers of two around it, up to one that no longer fits."""
    limit = (largest or 1) if has_card else max(64, 2 * configured)
    powers = [1 << exponent for exponent in range(21) if 1 << exponent < limit]
    next_power = 1 << len(powers) if 1 << len(powers) > limit else 2 << len(powers)
    return sorted({configured, *powers[-_MOST_ROWS:], limit, *([next_power] if has_card else [])})


def _remarks(workload: Workload, settings: StepSettings, gpu: Gpu | None) -> list[str]:
    remarks = []
    if settings.sharding is not None:
        count = settings.sharding.world_size
        devices = "one device" if count == 1 else f"{count} devices"
        remarks.append(f"{devices}, {_ENGINE_WORDS[settings.sharding.engine]}{'' if count == 1 else ': the figures are those of one'}")
    remarks.extend(allocator_note(settings))
    if gpu is not None and gpu.capability is not None and not gpu.supports(settings.precision):
        remarks.append(f"{gpu.name} has no {settings.precision}: it needs compute capability 8.0")
    if gpu is not None and gpu.capability is None:
        remarks.append(f"{gpu.name}: its generation is unknown, an A100's kernels and context are assumed")
    if workload.batch_dependent_loss:
        remarks.append(f"trading batch for accumulation changes training: {workload.batch_dependent_loss}")
    return remarks


def _sample(shape: BatchShape) -> str | None:
    if shape.kind == "image":
        return f"{shape.height} × {shape.width} pixels"
    if shape.audio_samples:
        return f"{shape.audio_samples / 16_000:g} s of audio"
    if shape.length and shape.target_length:
        return f"{shape.length} → {shape.target_length} tokens"
    return f"{shape.length} tokens" if shape.length else None
