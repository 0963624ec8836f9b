"""What a config's arguments mean for one optimizer step and for the engine that shares it over devices.

What a config's arguments make of one optimizer step: the settings the estimate traces, with the installed transformers' defaults.

Which engine a config trains on several devices with, and its sizes: read from `fsdp`, `fsdp_config` and `deepspeed`.

`auto` values of a DeepSpeed config become what transformers fills in (integrations/deepspeed.py): sizes from the model's hidden size.
Tensor, sequence and context parallel ranks share their samples: they do not multiply the effective batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import default_optim
from hfopt.compat.versions import release
from hfopt.config.deepspeed_json import config_mapping
from hfopt.facts.training_keys import installed
from hfopt.schema import Checkpointing, Precision, Sharding, StepSettings, ZeroSizes


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
    before_5 = release(installed().version) < (5, 0)
    every = kwargs.get("every_n_layers", 1)
    return Checkpointing(
        every_n_layers=every if isinstance(every, int) and every >= 1 else 1, use_reentrant=kwargs.get("use_reentrant", before_5) is True
    )


_SHARING = ("tp_size", "cp_size", "sp_size")  # accelerate's ParallelismConfig


def sharding_of(args: Mapping[str, Any], *, world_size: int, hidden_size: int | None = None, folder: Path | None = None) -> Sharding | None:
    """None: one device. `folder` is where the YAML stands; a path in it counts from the current folder first, as transformers reads it."""
    if world_size < 2:
        return None
    if args.get("deepspeed"):
        return _zero(config_mapping(args["deepspeed"], "deepspeed", folder), world_size, hidden_size)
    if uses_fsdp(args):
        return _fsdp(args, config_mapping(args.get("fsdp_config") or {}, "fsdp_config", folder), world_size)
    return Sharding(engine="ddp", world_size=world_size)


def uses_fsdp(args: Mapping[str, Any]) -> bool:
    """`fsdp_config` alone switches nothing on."""
    return args.get("fsdp") not in (None, False, "", [], "False", "false", "no_shard")


def model_parallel_of(args: Mapping[str, Any], folder: Path | None = None) -> int:
    """How many ranks work on the same samples."""
    found = args.get("parallelism_config")
    sizes = [int(found.get(name) or 1) for name in _SHARING] if isinstance(found, Mapping) else [int(args.get("tp_size") or 1)]
    if args.get("deepspeed"):
        config = config_mapping(args["deepspeed"], "deepspeed", folder)
        tensor = config.get("tensor_parallel")
        sizes += [int(config.get("sequence_parallel_size") or 1), int((tensor or {}).get("autotp_size") or 1)]
    product = 1
    for size in sizes:
        product *= max(1, size)
    return product


def fixed_by_deepspeed(args: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """What the DeepSpeed config states itself, by the argument that has to agree; 'auto' leaves it to the arguments.

    The optimizer stands for no value of `optim`; it takes its place.
    """
    if not args.get("deepspeed"):
        return {}
    config = config_mapping(args["deepspeed"], "deepspeed", folder)
    stated = {
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "train_batch_size": config.get("train_batch_size"),
        "bf16": (config.get("bf16") or {}).get("enabled"),
        "fp16": (config.get("fp16") or {}).get("enabled"),
        "optim": (config.get("optimizer") or {}).get("type"),
    }
    return {key: value for key, value in stated.items() if value not in (None, "auto")}


def _fsdp(args: Mapping[str, Any], config: Mapping[str, Any], world_size: int) -> Sharding:
    words = args["fsdp"]
    options = set(words.split() if isinstance(words, str) else words if isinstance(words, (list, tuple)) else ())
    wrap = config.get("transformer_layer_cls_to_wrap") or ()
    reshard = config.get("reshard_after_forward", "shard_grad_op" not in options)
    return Sharding(
        engine="fsdp2",
        world_size=world_size,
        reshard_after_forward=_true(reshard) or str(reshard).lower() in ("full_shard", "hybrid_shard", "1", "4"),
        offload_parameters=_true(config.get("cpu_offload")) or _true(config.get("offload_params")) or "offload" in options,
        sync_each_batch=_syncs_each_batch(args),
        wrap=tuple(wrap.split(",")) if isinstance(wrap, str) else tuple(wrap),
    )


def _syncs_each_batch(args: Mapping[str, Any]) -> bool:
    config = args.get("accelerator_config")
    name = "gradient_accumulation_kwargs"
    kwargs = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)  # a live run has the object
    return isinstance(kwargs, Mapping) and _true(kwargs.get("sync_each_batch"))


def _zero(config: Mapping[str, Any], world_size: int, hidden_size: int | None) -> Sharding:
    zero = config.get("zero_optimization") or {}
    stage = int(zero.get("stage") or 0)
    if stage == 0:
        return Sharding(engine="ddp", world_size=world_size)
    squared = None if hidden_size is None else hidden_size * hidden_size

    def size(key: str, automatic: float | None, default: int) -> int:
        value = zero.get(key, default)
        return default if value == "auto" and automatic is None else int(automatic or 0) if value == "auto" else int(float(value))

    defaults = ZeroSizes()
    return Sharding(
        engine="zero3" if stage == 3 else "zero2",
        world_size=world_size,
        offload_optimizer=_offloads(zero.get("offload_optimizer")) or _true(zero.get("cpu_offload")),
        offload_parameters=_offloads(zero.get("offload_param")),
        zero=ZeroSizes(
            reduce_bucket=size("reduce_bucket_size", squared, defaults.reduce_bucket),
            allgather_bucket=size("allgather_bucket_size", None, defaults.allgather_bucket),
            prefetch_bucket=size("stage3_prefetch_bucket_size", squared and int(0.9 * squared), defaults.prefetch_bucket),
            persistence_threshold=size(
                "stage3_param_persistence_threshold", hidden_size and 10 * hidden_size, defaults.persistence_threshold
            ),
            max_live=size("stage3_max_live_parameters", None, defaults.max_live),
            max_reuse_distance=size("stage3_max_reuse_distance", None, defaults.max_reuse_distance),
            overlap_comm=_true(zero.get("overlap_comm", stage == 3)),
            contiguous_gradients=_true(zero.get("contiguous_gradients", True)),
            divides_gradients=stage > 1,
        ),
    )


def _offloads(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("device", "none") in ("cpu", "nvme")


def _true(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "auto"))
