"""The engines that let several devices share one model: what each writes into the config, in the order they are tried.

DDP repeats the model on each device, so it is tried first and taken when it fits. FSDP2 shards weights, gradients and optimizer states;
it comes with torch. ZeRO-2 shards gradients and states, ZeRO-3 weights too; they need DeepSpeed. Offloading to the host's memory is slow
and comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.config.settings import uses_fsdp
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import installed
from hfopt.schema import TrainJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    key: str  # as --engine names it
    words: str
    offloads: bool = False
    zero_stage: int | None = None
    reshard: bool = True

    @property
    def family(self) -> str:
        return "deepspeed" if self.zero_stage else "fsdp" if self.key.startswith("fsdp") else "ddp"


ENGINES: tuple[Engine, ...] = (
    Engine(key="ddp", words="DDP"),
    Engine(key="fsdp2", words="FSDP2"),
    Engine(key="fsdp2-keep", words="FSDP2 that keeps gathered weights until the backward", reshard=False),
    Engine(key="zero2", words="ZeRO-2", zero_stage=2),
    Engine(key="zero3", words="ZeRO-3", zero_stage=3),
    Engine(key="fsdp2-offload", words="FSDP2 with CPU offload", offloads=True),
    Engine(key="zero2-offload", words="ZeRO-2 with CPU offload", offloads=True, zero_stage=2),
    Engine(key="zero3-offload", words="ZeRO-3 with CPU offload", offloads=True, zero_stage=3),
)
ENGINE_KEYS = ("fsdp", "fsdp_config", "deepspeed", "accelerator_config", "ddp_backend")
BOTH_BACKENDS = "cuda:nccl,cpu:gloo"


def named_engine(key: str) -> Engine:
    found = next((engine for engine in ENGINES if engine.key == key), None)
    if found is None:
        raise ConfigError(f"--engine {key} is not known", hint=f"one of {', '.join(engine.key for engine in ENGINES)}")
    return found


def engine_of(args: Mapping[str, Any]) -> Engine | None:
    """The family the config asks for; None: it leaves the choice open."""
    if args.get("deepspeed"):
        return Engine(key="deepspeed", words="DeepSpeed as configured", zero_stage=1)
    if uses_fsdp(args):
        return Engine(key="fsdp", words="FSDP as configured")
    return None


def engine_args(engine: Engine, job: TrainJob, wrap: tuple[str, ...], *, adapters: bool) -> dict[str, Any]:
    """The arguments with this engine's keys in place of others' (None: not set)."""
    keys: dict[str, Any] = dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"))
    if engine.family == "fsdp":
        keys.update(_fsdp(engine, wrap))
        if keys["fsdp_config"].get("cpu_offload") and not job.args.get("ddp_backend"):  # the norm of gradients on the host is summed there
            keys["ddp_backend"] = BOTH_BACKENDS
        if not adapters:  # whole gradients through the accumulation would undo the sharding; an adapter's are small
            keys["accelerator_config"] = _synced(job.args.get("accelerator_config"))
    elif engine.family == "deepspeed":
        keys["deepspeed"] = deepspeed_config(engine)
    kept = {key: value for key, value in job.args.items() if key not in ENGINE_KEYS or key not in keys}
    return kept | {key: value for key, value in keys.items() if value is not None}


def _fsdp(engine: Engine, wrap: tuple[str, ...]) -> dict[str, Any]:
    if int(installed().version.split(".")[0]) < 5:  # FSDP1 there; its shards are FSDP2's
        words = ("full_shard" if engine.reshard else "shard_grad_op") + (" offload" if engine.offloads else "") + " auto_wrap"
        return {"fsdp": words, "fsdp_config": {"transformer_layer_cls_to_wrap": list(wrap), "use_orig_params": True}}
    config: dict[str, Any] = {"version": 2, "reshard_after_forward": engine.reshard, "transformer_layer_cls_to_wrap": list(wrap)}
    if engine.offloads:
        config["cpu_offload"] = True
    return {"fsdp": True, "fsdp_config": config}


def _synced(accelerator_config: Any) -> dict[str, Any]:
    config = dict(accelerator_config) if isinstance(accelerator_config, Mapping) else {}
    kwargs = config.get("gradient_accumulation_kwargs")
    config["gradient_accumulation_kwargs"] = {**(kwargs if isinstance(kwargs, Mapping) else {}), "sync_each_batch": True}
    return config


def deepspeed_config(engine: Engine) -> dict[str, Any]:
    """What follows from TrainingArguments stays `auto`, so that the two cannot disagree."""
    zero: dict[str, Any] = {"stage": engine.zero_stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if engine.zero_stage == 3:
        zero.update(
            stage3_prefetch_bucket_size="auto",
            stage3_param_persistence_threshold="auto",
            stage3_gather_16bit_weights_on_model_save=True,
        )
    if engine.offloads:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if engine.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **dict.fromkeys(automatic, "auto"),
    }
