"""`hfopt.plan` for Python callers: a config, a Trainer, or TrainingArguments with a model.

An option left at None keeps what the config and the machine say. `request` is for callers that already hold one; keywords given beside
it take precedence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfopt.errors import ConfigError
from hfopt.job.request import LrScaling, Progress, Request, launched
from hfopt.planner.algorithm import make_plan
from hfopt.planner.result import Plan
from hfopt.schema import Task

if TYPE_CHECKING:
    from hfopt.pricing.forked_traces import Estimator


def plan(
    source: str | PathLike[str] | Any,
    request: Request | None = None,
    *,
    gpu: str | None = None,
    vram_gib: float | None = None,
    num_gpus: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    host: str | None = None,
    engine: str | None = None,
    accelerate: str | PathLike[str] | None = None,
    assume_zero: int | None = None,
    model_parallel: int | None = None,
    model: str | None = None,
    like: str | None = None,
    model_from: str | PathLike[str] | None = None,
    task: Task | None = None,
    seq_len: int | None = None,
    lengths: Iterable[int] | None = None,
    samples: int | None = None,
    section: str | None = None,
    effective_batch: int | None = None,
    lr_scaling: LrScaling | None = None,
    keep: Iterable[str] | None = None,
    allow: Iterable[str] | None = None,
    headroom: float | None = None,
    dry_run: bool | None = None,
    trust_remote_code: bool | None = None,
    for_transformers: str | None = None,
    progress: Progress = lambda text: None,
    estimator: Estimator | None = None,
) -> Plan:
    """The fastest settings that fit, with the reason for every change.

    source             a path to a YAML, a Trainer, or a TrainingArguments with `model=`
    gpu                plan for this card (see `hfopt gpus`), here or not; default: the card that is here, or the CPU
    vram_gib           memory of the card in GiB, where it differs from the catalog's
    num_gpus, nodes    devices of each machine, and machines
    host               the machine the run will be on: "16cores", "30us" (a launch), both, or the JSON of `hfopt calibrate` there
    link               between devices: "nvlink", "pcie" or "network", with a rate or without ("network:400Gbit/s")
    engine             "ddp", "fsdp2", "zero2", "zero3", or one with "-offload"; default: the cheapest that fits
    accelerate         a file of `accelerate config`, which says engine, processes and precision
    assume_zero        the ZeRO stage of a DeepSpeed config whose JSON is not here
    model_parallel     devices that share their samples (tensor, sequence or context parallel)
    model              hub id, folder or config.json, instead of the config's model
    like               a known model of the same architecture, for one whose configuration cannot be found
    model_from         another YAML, which names the model
    task               for example "causal_lm" or "sequence_classification"
    seq_len, lengths   tokens per sample; or the lengths of typical samples
    samples            how many training samples there are, where the config does not say
    section            where the arguments are in the YAML, as a path of keys: "trainer.args"
    effective_batch    another effective batch than the config's; `lr_scaling` ("sqrt", "linear") moves the learning rate with it
    keep               keys that stay as they are
    allow              what else may be tried: "optim", "torch_compile", "use_liger_kernel", "attn_implementation", "accumulation"
    headroom           share of the memory to leave free (0.06)
    dry_run            try the result on the device, or rehearse it (by default not where kept traces answer for a card that is not here)
    trust_remote_code  run the model's own code
    for_transformers   the version that will read the YAML ("4.57"), where training runs elsewhere; default: the installed one
    progress           called with a line of text at each stage
    estimator          a memory estimator shared between plans

    Raises HfoptError (bad input), of which NothingFits says what would fit.
    """
    wishes = _wishes(locals())
    return make_plan(source, launched(replace(request or Request(), **wishes)), progress=progress, estimator=estimator)


def _wishes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters of `plan` those that a Request has and that say something."""
    wishes = {one.name: given[one.name] for one in fields(Request) if given.get(one.name) is not None}
    read: dict[str, Callable[[Any], Any]] = {"accelerate": Path, "model_from": Path, "lengths": tuple}
    read |= {name: partial(_names, name) for name in ("keep", "allow")}
    return {name: read[name](value) if name in read else value for name, value in wishes.items()}


def _names(option: str, names: Iterable[str]) -> frozenset[str]:
    """A lone string would be taken apart into letters."""
    if isinstance(names, str):
        raise ConfigError(f"{option}={names!r} is one string", hint=f"give a list of names: {option}=[{names!r}]")
    return frozenset(names)
