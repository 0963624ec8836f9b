"""`hfopt estimate`: the memory of a training step by batch size and checkpointing, and whether it fits the card."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hfopt.cli.inputs import Overrides, read_hardware, read_job
from hfopt.cli.output import people
from hfopt.errors import ConfigError

if TYPE_CHECKING:
    from hfopt.estimate.memory import MemoryCurve
    from hfopt.schema import BatchShape, Checkpointing, Gpu, MemoryPeak, MemoryRow, MemoryTable, Precision, StepSettings, TrainJob, Workload

_MOST_ROWS = 6  # per checkpointing, when no sizes are asked for


def estimate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TrainingArguments YAML, a model folder, a config.json or a hub id.")],
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="A card by name (3090, a100-80gb); else the one here.")] = None,
    vram: Annotated[str | None, typer.Option("--vram", metavar="GiB", help="Any card of that much memory.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Instead of the config's model.")] = None,
    task: Annotated[str | None, typer.Option("--task", help="Instead of the head the config names.")] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch-sizes", metavar="1,2,4,…", help="Per-device batch sizes.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", metavar="TOKENS", help="Length of the longest sample.")] = None,
    precision: Annotated[str | None, typer.Option("--precision", metavar="fp32|tf32|fp16|bf16", help="Instead of the config's.")] = None,
    section: Annotated[str | None, typer.Option("--section", help="Where the arguments are, as a path of keys: trainer.args.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the GPU memory of a training step without a GPU: by batch size, with and without gradient checkpointing."""
    from hfopt.workload.recipe import quietly

    asked_sizes = _sizes(batch_sizes)
    asked_precision = _precision(precision)
    overrides = Overrides(model=model, task=task, seq_len=seq_len, section=section, trust_remote_code=trust_remote_code)
    job = read_job(config, overrides)
    hardware = read_hardware(gpu, vram)
    with people().status("reading the model …") as status, quietly():
        table = memory_table(job, hardware.smallest, precision=asked_precision, batch_sizes=asked_sizes, progress=status.update)
    table = replace(table, notes=(*hardware.notes, *table.notes))
    if as_json:
        sys.stdout.write(json.dumps(as_data(table), indent=2) + "\n")
    else:
        from hfopt.report.memory_text import print_memory

        print_memory(people(), table)


def memory_table(
    job: TrainJob, gpu: Gpu | None, *, precision: Precision | None, batch_sizes: Sequence[int], progress: Callable[[str], None]
) -> MemoryTable:
    """Traces the step with and without checkpointing and prices the batch sizes."""
    from hfopt.config.step import full_checkpointing, step_settings
    from hfopt.estimate.memory import estimate as estimate_memory
    from hfopt.schema import Checkpointing, MemoryTable
    from hfopt.workload.model import from_spec

    workload = from_spec(job.model, job.data, trainer=job.trainer)
    settings = step_settings(job.args, capability=(gpu.capability if gpu else None) or (8, 0))
    settings = replace(settings, precision=precision or settings.precision)
    notes = list(_remarks(workload, settings, gpu))
    ways = [Checkpointing()]
    if workload.checkpointable:
        ways.append(full_checkpointing(job.args))
    elif settings.checkpointing.on:
        settings = replace(settings, checkpointing=Checkpointing())
        notes.append(f"{workload.model_class} has no gradient checkpointing: the setting is left out")
    rows: list[MemoryRow] = []
    largest: dict[bool, int | None] = {}
    available = _available(gpu)
    seconds = 0.0
    for way in ways:
        progress(f"tracing {workload.model_class} {'with' if way.on else 'without'} checkpointing …")
        result = estimate_memory(workload, replace(settings, checkpointing=way))
        seconds += result.seconds
        notes += [note for note in result.notes if note not in notes]
        progress("replaying the allocator …")
        largest[way.on] = result.curve.largest_batch(available) if available is not None else None
        sizes = batch_sizes or _usual_sizes(job.per_device_batch, largest[way.on], available is not None)
        rows += [
            _row(result.curve, size, way, available, asked=size == job.per_device_batch and way == settings.checkpointing) for size in sizes
        ]
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
        notes=tuple(notes),
    )


def as_data(table: MemoryTable) -> dict[str, Any]:
    """The `--json` object."""
    return {
        "model": table.model,
        "model_class": table.model_class,
        "parameters": table.parameters,
        "trainable_parameters": table.trainable_parameters,
        "device": table.device.name if table.device else None,
        "device_memory_bytes": table.device.memory_bytes if table.device else None,
        "available_bytes": table.available_bytes,
        "precision": table.settings.precision,
        "optim": table.settings.optim,
        "largest_batch": table.largest_batch,
        "largest_batch_with_checkpointing": table.largest.get(True),
        "rows": [
            {
                "per_device_train_batch_size": row.peak.batch,
                "gradient_checkpointing": row.checkpointing.on,
                "peak_allocated_bytes": row.peak.allocated_bytes,
                "peak_reserved_bytes": row.peak.reserved_bytes,
                "context_bytes": row.peak.context_bytes,
                "device_bytes": row.peak.device_bytes,
                "fits": row.fits,
                "spare_bytes": row.spare_bytes,
                "breakdown": asdict(row.peak.breakdown) if row.peak.breakdown else None,
                "moment": row.peak.moment,
            }
            for row in table.rows
        ],
        "seconds": table.seconds,
        "notes": list(table.notes),
    }


def _row(curve: MemoryCurve, batch: int, checkpointing: Checkpointing, available: int | None, *, asked: bool) -> MemoryRow:
    """On a card that is nearly full the allocator gives cached blocks back, so what fits is replayed within the card's limit."""
    from hfopt.schema import MemoryRow

    peak = curve.peak(batch)
    if available is None:
        return MemoryRow(peak=peak, checkpointing=checkpointing, fits=None, spare_bytes=None, asked=asked)
    fits = curve.fits(batch, available)
    if fits and peak.device_bytes > available:
        peak = _within(peak, curve.replay(batch, capacity_bytes=available - peak.context_bytes).reserved_bytes)
    return MemoryRow(peak=peak, checkpointing=checkpointing, fits=fits, spare_bytes=available - peak.device_bytes, asked=asked)


def _within(peak: MemoryPeak, reserved_bytes: int) -> MemoryPeak:
    given_back = peak.reserved_bytes - reserved_bytes
    breakdown = peak.breakdown
    if breakdown is not None:
        breakdown = replace(breakdown, fragmentation_bytes=breakdown.fragmentation_bytes - given_back)
    return replace(peak, reserved_bytes=reserved_bytes, breakdown=breakdown)


def _available(gpu: Gpu | None) -> int | None:
    """Free memory of a card that is here, all of one that was named."""
    if gpu is None:
        return None
    return gpu.free_bytes or gpu.usable_bytes or gpu.memory_bytes


def _usual_sizes(configured: int, largest: int | None, has_card: bool) -> list[int]:
    """The config's batch and powers of two around it, up to one that no longer fits."""
    limit = (largest or 1) if has_card else max(64, 2 * configured)
    powers = [1 << exponent for exponent in range(21) if 1 << exponent < limit]
    powers = powers[-_MOST_ROWS:] + ([limit, 1 << len(powers)] if has_card else [limit])
    return sorted({configured, *powers})


def _sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        sizes = [int(part) for part in text.replace(" ", "").split(",") if part]
    except ValueError:
        raise ConfigError(
            f"--batch-sizes {text!r} is not a list of whole numbers", hint="write for example --batch-sizes 1,2,4,8"
        ) from None
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--batch-sizes {text!r}: a batch has at least one sample", hint="write for example --batch-sizes 1,2,4,8")
    return sorted(set(sizes))


def _precision(name: str | None) -> Precision | None:
    from hfopt.schema import Precision

    for precision in get_args(Precision):
        if name is not None and name.lower() == precision:
            return precision  # type: ignore[no-any-return]
    if name is not None:
        raise ConfigError(f"there is no precision {name!r}", hint=f"precisions are: {', '.join(get_args(Precision))}")
    return None


def _remarks(workload: Workload, settings: StepSettings, gpu: Gpu | None) -> list[str]:
    remarks = []
    if gpu is not None and gpu.capability is not None and not gpu.supports(settings.precision):
        remarks.append(f"{gpu.name} has no {settings.precision}: it needs compute capability 8.0")
    if gpu is not None and gpu.capability is None:
        remarks.append(f"{gpu.name}: its generation is unknown, an A100's kernels and context are assumed")
    if workload.batch_dependent_loss:
        remarks.append(f"trading batch for accumulation changes training: {workload.batch_dependent_loss}")
    return remarks


def _sample(shape: BatchShape) -> str | None:
    if shape.kind in ("image",) and shape.height:
        return f"{shape.height} × {shape.width} pixels"
    if shape.audio_samples:
        return f"{shape.audio_samples / 16_000:g} s of audio"
    if shape.length and shape.target_length:
        return f"{shape.length} → {shape.target_length} tokens"
    return f"{shape.length} tokens" if shape.length else None
