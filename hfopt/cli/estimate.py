"""`hfopt estimate`: the memory of a training step by batch size and checkpointing, and whether it fits the card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfopt.cli.json_output import answer_json
from hfopt.cli.options import (
    LENGTHS_HELP,
    ONE_TOKEN,
    Accelerate,
    Like,
    Model,
    ModelFrom,
    NumGpus,
    Section,
    TrustRemoteCode,
    Vram,
    complete_gpu,
    complete_precision,
    complete_task,
    numbers,
    precision_of,
    task_of,
)
from hfopt.cli.output import people, progress_on

if TYPE_CHECKING:
    from hfopt.schema import MemoryRow, MemoryTable
    from hfopt.schema.outputs import EstimateOutput, EstimateRow


def estimate(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TrainingArguments YAML, a model folder, a config.json or a hub id.")],
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", autocompletion=complete_gpu, help="A card by name (3090, a100-80gb); else the one here."),
    ] = None,
    vram: Vram = None,
    num_gpus: NumGpus = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Of several devices: ddp, fsdp2, zero2, zero3, …; else the config's, or DDP.")
    ] = None,
    accelerate: Accelerate = None,
    model: Model = None,
    like: Like = None,
    model_from: ModelFrom = None,
    task: Annotated[str | None, typer.Option("--task", autocompletion=complete_task, help="Instead of the head the config names.")] = None,
    batch_sizes: Annotated[str | None, typer.Option("--batch-sizes", metavar="1,2,4,…", help="Per-device batch sizes.")] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", metavar="TOKENS", min=1, help="Length of the longest sample.")] = None,
    lengths: Annotated[str | None, typer.Option("--lengths", metavar="60,90,300,…", help=LENGTHS_HELP)] = None,
    precision: Annotated[
        str | None,
        typer.Option("--precision", autocompletion=complete_precision, metavar="fp32|tf32|fp16|bf16", help="Instead of the config's."),
    ] = None,
    section: Section = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the GPU memory of a training step, with no GPU. By batch size, with and without gradient checkpointing.

    \b
    Examples:
      hfopt estimate train.yaml --gpu 4090                       does it fit, and what is the largest batch
      hfopt estimate train.yaml --vram 12 --batch-sizes 1,2,4,8  any card of 12 GiB
      hfopt estimate gpt2 --seq-len 1024 --precision bf16        a model alone, no config
      hfopt estimate train.yaml --gpu h100-sxm --num-gpus 8 --engine fsdp2  one of eight cards that share the model
      hfopt estimate train.yaml --gpu t4 --json                  for a program
    """
    sizes = sorted(set(numbers("--batch-sizes", batch_sizes, least="a batch has at least one sample")))
    asked_precision, asked_task = precision_of(precision), task_of(task)
    with people().status("reading the model …") as status:
        from hfopt.job.request import Request, launched
        from hfopt.planner.memory_table import memory_table, read_subject, with_engine

        wishes = Request(
            own_process=True,
            gpu=gpu,
            vram_gib=vram,
            num_gpus=num_gpus,
            engine=engine,
            accelerate=accelerate,
            model=model,
            like=like,
            model_from=model_from,
            task=asked_task,
            seq_len=seq_len,
            lengths=numbers("--lengths", lengths, least=ONE_TOKEN),
            section=section,
            trust_remote_code=trust_remote_code,
        )
        request = launched(wishes)
        subject = with_engine(read_subject(config, request), request)
        table = memory_table(subject, request, precision=asked_precision, batch_sizes=sizes, progress=progress_on(status))
    if as_json:
        answer_json("estimate", _as_data(table))
    else:
        from hfopt.report.memory_text import print_memory

        print_memory(people(), table)


def _as_data(table: MemoryTable) -> EstimateOutput:
    return {
        "model": table.model,
        "model_class": table.model_class,
        "assumed": table.assumed,
        "parameters": table.parameters,
        "trainable_parameters": table.trainable_parameters,
        "device": table.device.name if table.device else None,
        "device_memory_bytes": table.device.memory_bytes if table.device else None,
        "available_bytes": table.available_bytes,
        "precision": table.settings.precision,
        "optim": table.settings.optim,
        "devices": table.settings.sharding.world_size if table.settings.sharding else 1,
        "engine": table.settings.sharding.engine if table.settings.sharding else None,
        "largest_batch": table.largest_batch,
        "largest_batch_with_checkpointing": table.largest.get(True),
        "evaluation": table.evaluation,
        "rows": [_row_data(row) for row in table.rows],
        "seconds": table.seconds,
        "notes": table.notes,
    }


def _row_data(row: MemoryRow) -> EstimateRow:
    return {
        "per_device_train_batch_size": row.peak.batch,
        "gradient_checkpointing": row.checkpointing.on,
        "peak_allocated_bytes": row.peak.allocated_bytes,
        "peak_reserved_bytes": row.peak.reserved_bytes,
        "context_bytes": row.peak.context_bytes,
        "device_bytes": row.peak.device_bytes,
        "fits": row.fits,
        "spare_bytes": row.spare_bytes,
        "breakdown": row.peak.breakdown,
        "moment": row.peak.moment,
    }
