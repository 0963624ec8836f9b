"""What a config's arguments make of one optimizer step: the settings the estimate traces, with the installed transformers' defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hfopt.facts.training_keys import installed
from hfopt.schema import Checkpointing, Precision, StepSettings


def step_settings(args: Mapping[str, Any], *, capability: tuple[int, int] = (8, 0), multiprocessors: int | None = None) -> StepSettings:
    """From the keys a TrainJob sets (right types, current names); a key that is not there has the Trainer's default."""

    def value(key: str, otherwise: Any) -> Any:
        if args.get(key) is not None:
            return args[key]
        field = installed().fields.get(key)
        return field.default if field is not None and field.default is not None else otherwise

    return StepSettings(
        precision=precision_of(args),
        checkpointing=checkpointing_of(args),
        accumulation=int(value("gradient_accumulation_steps", 1)),
        optim=str(args.get("optim") or default_optim()),
        optim_args=args.get("optim_args"),
        max_grad_norm=float(value("max_grad_norm", 1.0)),
        label_smoothing=float(value("label_smoothing_factor", 0.0)),
        torch_compile=bool(value("torch_compile", False)),
        capability=capability,
        multiprocessors=multiprocessors,
    )


@cache
def default_optim() -> str:
    """transformers decides it while its class is made: fused AdamW where it knows torch 2.8 and finds it."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8")
    torch_version = tuple(int(part) for part in re.findall(r"\d+", metadata.version("torch"))[:2])
    fused = re.search(r'^\s*default_optim = "adamw_torch_fused"$', source, re.MULTILINE) is not None and torch_version >= (2, 8)
    return "adamw_torch_fused" if fused else "adamw_torch"


def precision_of(args: Mapping[str, Any]) -> Precision:
    """bf16 and fp16 are autocast; tf32 is what float32 matmuls run in."""
    for precision in ("bf16", "fp16", "tf32"):
        if args.get(precision) is True:
            return precision
    return "fp32"


def checkpointing_of(args: Mapping[str, Any]) -> Checkpointing:
    """Off, or every n-th layer. Reentrant is transformers' default before version 5, unless the kwargs say otherwise."""
    if args.get("gradient_checkpointing") is not True:
        return Checkpointing()
    return full_checkpointing(args)


def full_checkpointing(args: Mapping[str, Any]) -> Checkpointing:
    """Checkpointing as this config would have it if it were on."""
    kwargs = args.get("gradient_checkpointing_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    before_5 = int(installed().version.split(".")[0]) < 5
    every = kwargs.get("every_n_layers", 1)
    return Checkpointing(
        every_n_layers=every if isinstance(every, int) and every >= 1 else 1, use_reentrant=kwargs.get("use_reentrant", before_5) is True
    )
