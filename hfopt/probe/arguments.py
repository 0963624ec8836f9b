"""The TrainingArguments of a dry run: what the job and the candidate say about a step, and nothing that writes, reports or lasts.

Pure: takes the names of the installed TrainingArguments' fields, so that it fits every version of transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.schema import Candidate, TrainJob

Device = Literal["cuda", "cpu", "virtual"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How much of a run a dry run is."""

    steps: int = 3  # the first has no optimizer state yet, the others have
    micro_batches: int | None = None  # that are run of each step, with the inputs of all on the device; None: all
    enough_s: float | None = None  # no further step is begun after so many seconds of a few; None: all steps


_KEPT = frozenset(
    {
        "adafactor",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "average_tokens_across_devices",
        "bf16_full_eval",
        "dataloader_pin_memory",
        "eval_accumulation_steps",
        "fp16_full_eval",
        "gradient_checkpointing_kwargs",
        "label_smoothing_factor",
        "learning_rate",
        "liger_kernel_config",
        "lr_scheduler_kwargs",
        "lr_scheduler_type",
        "max_grad_norm",
        "neftune_noise_alpha",
        "optim",
        "optim_args",
        "optim_target_modules",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "seed",
        "torch_empty_cache_steps",
        "warmup_steps",
        "weight_decay",
    }
)
"""Keys of the config that change what a step allocates or computes."""

_QUIET = {
    "dataloader_num_workers": 0,
    "disable_tqdm": True,
    "eval_strategy": "no",
    "logging_strategy": "no",
    "push_to_hub": False,
    "remove_unused_columns": False,
    "report_to": [],
    "save_strategy": "no",
}


def evaluates(args: Mapping[str, Any]) -> bool:
    """Does a run with these arguments evaluate?"""
    return args.get("eval_strategy", "no") not in ("no", None, False) or args.get("do_eval") is True


def training_arguments(
    job: TrainJob,
    candidate: Candidate,
    *,
    device: Device,
    steps: int,
    output_dir: str,
    fields: Collection[str],
    eval_batch: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments for TrainingArguments; keys this version does not have are left out. eval_batch: instead of the job's own."""
    chosen = {key: value for key, value in job.args.items() if key in _KEPT} | _QUIET | _precision(candidate, device)
    chosen |= {
        "output_dir": output_dir,
        "max_steps": steps,
        "per_device_train_batch_size": candidate.per_device_batch,
        "gradient_accumulation_steps": candidate.accumulation,
        "gradient_checkpointing": candidate.checkpointing.on,
        "torch_compile": candidate.torch_compile,
        "use_liger_kernel": candidate.use_liger_kernel,
        "use_cpu": device == "cpu",
    }
    if eval_batch is not None:
        chosen["per_device_eval_batch_size"] = eval_batch
    if candidate.optim is not None:
        chosen["optim"] = candidate.optim
    if candidate.checkpointing.on:
        chosen["gradient_checkpointing_kwargs"] = _checkpointing(job, candidate)
    return {key: value for key, value in chosen.items() if key in fields}


def _precision(candidate: Candidate, device: Device) -> dict[str, Any]:
    tf32: bool | None = candidate.precision == "tf32"
    if device == "cpu":
        tf32 = None  # TrainingArguments refuses to hear of it without a card
    return {"bf16": candidate.precision == "bf16", "fp16": candidate.precision == "fp16", "tf32": tf32 or None}


def _checkpointing(job: TrainJob, candidate: Candidate) -> dict[str, Any]:
    options = dict(job.args.get("gradient_checkpointing_kwargs") or {})
    options.pop("every_n_layers", None)
    options["use_reentrant"] = candidate.checkpointing.use_reentrant
    if candidate.checkpointing.every_n_layers > 1:
        options["every_n_layers"] = candidate.checkpointing.every_n_layers
    return options
