"""What a config's arguments make of one optimizer step: the settings the estimate traces, with the installed transformers' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hfopt.config.installed import installed
from hfopt.schema import Checkpointing, Precision, StepSettings


def step_settings(args: Mapping[str, Any], *, capability: tuple[int, int] = (8, 0)) -> StepSettings:
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
        optim=str(value("optim", "adamw_torch")),
        optim_args=args.get("optim_args"),
        max_grad_norm=float(value("max_grad_norm", 1.0)),
        label_smoothing=float(value("label_smoothing_factor", 0.0)),
        torch_compile=bool(value("torch_compile", False)),
        capability=capability,
    )


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
