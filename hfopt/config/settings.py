"""What a config's arguments mean: the settings of the job, of one optimizer step, and of the engine that shares it over devices.

`trainer_settings` is the one place where keys become values with types, and where a key that is not set gets the default of the installed
transformers or TRL. `auto` values of a DeepSpeed config become what transformers fills in (integrations/deepspeed.py): sizes from the
model's hidden size. Tensor, sequence and context parallel ranks share their samples: they do not multiply the effective batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hfopt.compat.transformers_patches import default_optim
from hfopt.compat.versions import release
from hfopt.config.deepspeed_json import config_mapping
from hfopt.facts.argument_effects import stand_in
from hfopt.facts.training_keys import installed, trl_default
from hfopt.schema import (
    GENERATING,
    Checkpointing,
    EngineSettings,
    EvaluationArguments,
    LoaderSettings,
    Precision,
    RolloutSettings,
    Sharding,
    StepSettings,
    TrainerKind,
    TrainerSettings,
    TrainJob,
    ZeroSizes,
)

EVALUATION_BATCH = "per_device_eval_batch_size"
VLLM_MODE, VLLM_SHARE, VLLM_SLEEP = "vllm_mode", "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode"
_PREFETCHED = 2  # batches per worker, torch's DataLoader
_OFF: tuple[Any, ...] = (None, False, "", [], "False", "false", "no_shard")
_BEFORE_TRL_016 = {"GRPO": 8, "RLOO": 2}  # num_generations, where TRL is not installed


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keys:
    """The keys that are set (right types, current names), read with the installed defaults."""

    raw: Mapping[str, Any]
    trainer: TrainerKind

    def value(self, key: str, otherwise: Any = None) -> Any:
        if self.raw.get(key) is not None:
            return self.raw[key]
        field = installed().fields.get(key) or installed().seq2seq.get(key)
        return field.default if field is not None and field.default is not None else otherwise

    def of_trl(self, key: str, otherwise: Any = None) -> Any:
        if self.raw.get(key) is not None:
            return self.raw[key]
        default = trl_default(self.trainer, key)
        return otherwise if default is None else default

    def on(self, key: str) -> bool:
        return self.value(key) is True


def trainer_settings(raw: Mapping[str, Any], trainer: TrainerKind = "Trainer") -> TrainerSettings:
    """From the keys that a YAML sets, or from those of a live TrainingArguments that differ from its defaults."""
    keys = _Keys(raw=raw, trainer=trainer)
    steps = keys.value("max_steps")
    checkpointing = _checkpointing_when_on(raw)
    return TrainerSettings(
        precision=_precision(raw),
        checkpointing=checkpointing if raw.get("gradient_checkpointing") is True else Checkpointing(),
        checkpointing_when_on=checkpointing,
        optim=str(raw.get("optim") or default_optim()),
        optim_args=raw.get("optim_args"),
        max_grad_norm=float(keys.value("max_grad_norm", 1.0)),
        label_smoothing=float(keys.value("label_smoothing_factor", 0.0)),
        torch_compile=keys.on("torch_compile") or bool(raw.get("torch_compile_backend") or raw.get("torch_compile_mode")),
        compile_mode=str(raw.get("torch_compile_mode") or "default"),
        compile_backend=str(raw.get("torch_compile_backend") or "inductor"),
        liger=keys.on("use_liger_kernel"),
        loss_type=None if raw.get("loss_type") is None else str(raw["loss_type"]),
        learning_rate=float(raw.get("learning_rate") or keys.value("learning_rate")),
        max_steps=steps if isinstance(steps, int) and steps > 0 else None,
        epochs=float(raw.get("num_train_epochs") or keys.value("num_train_epochs")),
        use_cpu=keys.on("use_cpu"),
        loader=_loader(keys),
        evaluation=_evaluation(keys),
        engine=_engine(raw),
        rollout=_rollout(keys),
    )


def with_raw(job: TrainJob, raw: Mapping[str, Any]) -> TrainJob:
    """The job with other keys, and the settings that follow from them."""
    return replace(job, raw=raw, settings=trainer_settings(raw, job.trainer))


def step_settings(
    settings: TrainerSettings, *, accumulation: int = 1, capability: tuple[int, int] = (8, 0), multiprocessors: int | None = None
) -> StepSettings:
    """What one optimizer step rests on, on one device."""
    instead = stand_in(settings.optim)
    return StepSettings(
        precision=settings.precision,
        checkpointing=settings.checkpointing,
        accumulation=accumulation,
        optim=settings.optim if instead is None else instead.optim,
        optim_args=settings.optim_args,
        max_grad_norm=settings.max_grad_norm,
        label_smoothing=settings.label_smoothing,
        compile_mode=settings.compile_mode if settings.torch_compile else "default",
        capability=capability,
        multiprocessors=multiprocessors,
    )


def _precision(raw: Mapping[str, Any]) -> Precision:
    """bf16 and fp16 are autocast; tf32 is what float32 matmuls run in."""
    for precision in ("bf16", "fp16", "tf32"):
        if raw.get(precision) is True:
            return precision
    return "fp32"


def _checkpointing_when_on(raw: Mapping[str, Any]) -> Checkpointing:
    """Reentrant is transformers' default before version 5, unless the kwargs say otherwise."""
    kwargs = raw.get("gradient_checkpointing_kwargs")
    kwargs = kwargs if isinstance(kwargs, Mapping) else {}
    before_5 = release(installed().version) < (5, 0)
    every = kwargs.get("every_n_layers", 1)
    return Checkpointing(
        every_n_layers=every if isinstance(every, int) and every >= 1 else 1, use_reentrant=kwargs.get("use_reentrant", before_5) is True
    )


def _loader(keys: _Keys) -> LoaderSettings:
    workers = int(keys.value("dataloader_num_workers", 0))
    grouped = keys.raw.get("train_sampling_strategy") == "group_by_length" or keys.raw.get("group_by_length") is True
    return LoaderSettings(
        workers=workers,
        prefetch_factor=int(keys.value("dataloader_prefetch_factor", _PREFETCHED)) if workers else None,
        pin_memory=keys.raw.get("dataloader_pin_memory") is not False,
        persistent_workers=keys.on("dataloader_persistent_workers"),
        groups_by_length=grouped,
    )


def _evaluation(keys: _Keys) -> EvaluationArguments:
    raw = keys.raw
    best = raw.get("metric_for_best_model")
    return EvaluationArguments(
        runs=raw.get("eval_strategy", "no") not in ("no", None, False) or raw.get("do_eval") is True,
        batch=int(keys.value(EVALUATION_BATCH, 8)),
        accumulation_steps=raw.get("eval_accumulation_steps"),
        loss_only=raw.get("prediction_loss_only") is True,
        batchwise_metrics=raw.get("batch_eval_metrics") is True,
        concatenates=raw.get("eval_do_concat_batches") is not False,
        best_metric=best if isinstance(best, str) else None,
        generates=raw.get("predict_with_generate") is True,
        generation_max_length=_whole(raw.get("generation_max_length")),
        generation_beams=_whole(raw.get("generation_num_beams")) or 1,
    )


def _engine(raw: Mapping[str, Any]) -> EngineSettings:
    words, parallel = raw.get("fsdp"), raw.get("parallelism_config")
    options = words.split() if isinstance(words, str) else words if isinstance(words, (list, tuple)) else ()
    sizes = [parallel.get(name) for name in _SHARING] if isinstance(parallel, Mapping) else [raw.get("tp_size")]
    return EngineSettings(
        deepspeed=raw.get("deepspeed") or None,
        fsdp=None if words in _OFF else tuple(str(option) for option in options),
        fsdp_config=raw.get("fsdp_config") or None,
        sync_each_batch=_syncs_each_batch(raw),
        model_parallel=_product(sizes),
        ddp_backend=raw.get("ddp_backend") or None,
    )


def _rollout(keys: _Keys) -> RolloutSettings:
    raw, share = keys.raw, _number(keys.of_trl(VLLM_SHARE))
    generations = keys.of_trl("num_generations", _BEFORE_TRL_016.get(keys.trainer)) if keys.trainer in GENERATING else None
    return RolloutSettings(
        generations=_whole(generations),
        batch=_whole(raw.get("generation_batch_size")),
        steps=_whole(raw.get("steps_per_generation")),
        uses_vllm=raw.get("use_vllm") is True,
        vllm_mode=str(keys.of_trl(VLLM_MODE, "colocate")),
        states_vllm_mode=raw.get(VLLM_MODE) is not None,
        vllm_share=0.3 if share is None else share,
        states_vllm_share=_number(raw.get(VLLM_SHARE)) is not None,
        vllm_sleeps=keys.of_trl(VLLM_SLEEP, False) is True,
        vllm_tensor_parallel=_whole(raw.get("vllm_tensor_parallel_size")) or 1,
    )


def _number(value: Any) -> float | None:
    """TRL's keys are not checked against their types: what is no number says nothing."""
    try:
        return float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except ValueError:
        return None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or not number.is_integer() or number < 1 else int(number)


def _product(sizes: list[Any]) -> int:
    product = 1
    for size in sizes:
        product *= _whole(size) or 1
    return product


_SHARING = ("tp_size", "cp_size", "sp_size")  # accelerate's ParallelismConfig


def sharding_of(engine: EngineSettings, *, world_size: int, hidden_size: int | None = None, folder: Path | None = None) -> Sharding | None:
    """None: one device that nothing is shared with. DeepSpeed keeps float32 copies of what trains, and its buffers, on one device too.

    `folder` is where the YAML stands; a path in it counts from the current folder first, as transformers reads it.
    """
    if engine.deepspeed is not None:
        found = _zero(config_mapping(engine.deepspeed, "deepspeed", folder), world_size, hidden_size)
        return None if world_size < 2 and found.engine == "ddp" else found
    if world_size < 2:
        return None
    if engine.fsdp is not None:
        return _fsdp(engine, config_mapping(engine.fsdp_config or {}, "fsdp_config", folder), world_size)
    return Sharding(engine="ddp", world_size=world_size)


def model_parallel_of(engine: EngineSettings, folder: Path | None = None) -> int:
    """How many ranks work on the same samples."""
    if engine.deepspeed is None:
        return engine.model_parallel
    config = config_mapping(engine.deepspeed, "deepspeed", folder)
    tensor = config.get("tensor_parallel")
    return engine.model_parallel * _product([config.get("sequence_parallel_size"), (tensor or {}).get("autotp_size")])


def fixed_by_deepspeed(engine: EngineSettings, folder: Path | None = None) -> dict[str, Any]:
    """What the DeepSpeed config states itself, by the argument that has to agree; 'auto' leaves it to the arguments.

    The optimizer stands for no value of `optim`; it takes its place.
    """
    if engine.deepspeed is None:
        return {}
    config = config_mapping(engine.deepspeed, "deepspeed", folder)
    stated = {
        "per_device_train_batch_size": config.get("train_micro_batch_size_per_gpu"),
        "gradient_accumulation_steps": config.get("gradient_accumulation_steps"),
        "train_batch_size": config.get("train_batch_size"),
        "bf16": (config.get("bf16") or {}).get("enabled"),
        "fp16": (config.get("fp16") or {}).get("enabled"),
        "optim": (config.get("optimizer") or {}).get("type"),
    }
    return {key: value for key, value in stated.items() if value not in (None, "auto")}


def _fsdp(engine: EngineSettings, config: Mapping[str, Any], world_size: int) -> Sharding:
    options = engine.fsdp or ()
    wrap = config.get("transformer_layer_cls_to_wrap") or ()
    reshard = config.get("reshard_after_forward", "shard_grad_op" not in options)
    return Sharding(
        engine="fsdp2",
        world_size=world_size,
        reshard_after_forward=_true(reshard) or str(reshard).lower() in ("full_shard", "hybrid_shard", "1", "4"),
        offload_parameters=_true(config.get("cpu_offload")) or _true(config.get("offload_params")) or "offload" in options,
        recomputes=_true(config.get("activation_checkpointing")),
        sync_each_batch=engine.sync_each_batch,
        wrap=tuple(wrap.split(",")) if isinstance(wrap, str) else tuple(wrap),
    )


def _syncs_each_batch(raw: Mapping[str, Any]) -> bool:
    config = raw.get("accelerator_config")
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
