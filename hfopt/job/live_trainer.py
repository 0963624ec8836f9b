"""What is planned, from a live Trainer or its arguments; what it does not let a plan change; and the card it sits on.

What a live Trainer does not let a plan change, and what its data does not; each with the words that say so. The device a live Trainer
already sits on: its own card, with what its process holds there counted as free again. A plan says what a whole training process needs,
weights and CUDA context included. The live process has taken part of that already, so free + reserved + context is what it can have;
tensors that are not the trained model's (a reference model, the user's own) stay and are taken off.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hfopt.compat.transformers_patches import is_checkpointing, launchers_precision
from hfopt.config.other_tools import trl_dtype
from hfopt.config.settings import trainer_settings, with_raw
from hfopt.errors import ConfigError
from hfopt.facts.training_keys import PRECISION_KEYS
from hfopt.job.request import Request
from hfopt.job.subject import Subject, hardware_of, workload_of
from hfopt.memory.step_memory import context_bytes
from hfopt.schema import DataSpec, EvaluationSpec, Gpu, Hardware, ModelSpec, TrainerKind, TrainJob

if TYPE_CHECKING:
    pass


BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_KINDS: dict[str, TrainerKind] = {
    "Seq2SeqTrainer": "Seq2SeqTrainer",
    "SFTTrainer": "SFT",
    "DPOTrainer": "DPO",
    "GRPOTrainer": "GRPO",
    "RewardTrainer": "Reward",
    "KTOTrainer": "KTO",
    "RLOOTrainer": "RLOO",
    "ORPOTrainer": "ORPO",
    "CPOTrainer": "CPO",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptKeys:
    keys: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    most_workers: int | None = None


def kind_of(trainer: Any) -> TrainerKind:
    """By the nearest known class it descends from."""
    return next((_KINDS[base.__name__] for base in type(trainer).__mro__ if base.__name__ in _KINDS), "Trainer")


def data_parallel_world(trainer: Any) -> int:
    """Ranks that share a sample (tensor, context, sequence parallel) do not multiply the batch."""
    world = int(getattr(trainer.args, "world_size", 1)) * max(1, int(getattr(trainer.args, "n_gpu", 1)))  # DataParallel's replicas count
    for size in ("get_tp_size", "get_cp_size", "get_sp_size"):
        if hasattr(trainer, size):
            world //= max(1, int(getattr(trainer, size)()))
    return max(1, world)


def kept_keys(trainer: Any) -> KeptKeys:
    """What was fixed when the Trainer was made."""
    keys: set[str] = set()
    notes: list[str] = []
    if getattr(trainer, "is_deepspeed_enabled", False):
        keys.update(BATCH_KEYS, PRECISION_KEYS)
        notes.append("DeepSpeed has already read batch, accumulation and precision from its own config: they stay")
    elif getattr(trainer.accelerator, "_models", None):
        keys.update(PRECISION_KEYS)
        notes.append("another model (a reference) is already prepared in the Trainer's precision, which stays")
    elif launchers_precision() not in ("no", _stated_precision(trainer.args)):
        keys.update(PRECISION_KEYS)
        notes.append("the launcher chose the precision (accelerate config): it stays")
    if trainer.optimizer is not None and "optim" not in keys:
        keys.add("optim")
    if getattr(trainer.args, "torch_compile", False):
        keys.update(("gradient_checkpointing", "gradient_checkpointing_kwargs"))
        notes.append("torch_compile: checkpointing stays as it is, because the model is compiled with it")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        notes.append(
            f"{trainer.args.n_gpu} GPUs in one process are DataParallel; `hfopt run --nproc {trainer.args.n_gpu}` gives each its own"
        )
    if getattr(trainer.args, "use_liger_kernel", False):
        notes.append("what liger's kernels save is not in the estimate: there is more room than it says")
    return KeptKeys(keys=frozenset(keys), notes=tuple(notes))


def _stated_precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def feeding_limits(trainer: Any) -> KeptKeys:
    """A stream is divided among workers by its shards; one that is not divisible would be read once by each of them."""
    from torch.utils.data import IterableDataset

    data = trainer.train_dataset
    if not isinstance(data, IterableDataset):
        return KeptKeys()
    shards = getattr(data, "num_shards", None) or getattr(data, "n_shards", None)
    if isinstance(shards, int):
        most = max(1, shards // max(1, data_parallel_world(trainer)))
        return KeptKeys(
            most_workers=most, notes=(f"the data is a stream of {shards} shard{'s' if shards != 1 else ''}: at most {most} workers",)
        )
    note = "the data is an IterableDataset of its own making, which every worker would read from its start: the workers stay"
    return KeptKeys(keys=frozenset({"dataloader_num_workers"}), notes=(note,))


def live_hardware(trainer: Any, request: Request) -> Hardware:
    """The named card when one was asked for; else the Trainer's own device, the CPU included."""
    hardware = hardware_of(request)
    device, args = trainer.args.device, trainer.args
    if hardware.hypothetical:
        return hardware
    if device.type != "cuda" or not hardware.gpus:
        return _shared_host(replace(hardware, gpus=()), args) if device.type == "cpu" else hardware
    index = device.index or 0
    gpus = hardware.gpus
    if args.world_size == 1 and args.n_gpu <= 1:
        gpus = gpus[index : index + 1] or gpus
    held = _held_bytes(trainer)
    return _shared_host(replace(hardware, gpus=tuple(_as_if_fresh(gpu, held) for gpu in gpus)), args)


def _as_if_fresh(gpu: Gpu, held: int) -> Gpu:
    """With several ranks the others hold on their cards what this one holds on its own."""
    context = context_bytes(gpu.capability, multiprocessors=gpu.sms) if gpu.capability is not None else 0
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.available_bytes
    return replace(gpu, free_bytes=min(free + held + context, gpu.usable_bytes or gpu.memory_bytes))


def _held_bytes(trainer: Any) -> int:
    """Reserved by this process, less what lives there besides the model: that does not become free."""
    import torch

    from hfopt.model.losses import trained_modules

    device = trainer.args.device
    tensors = (tensor for module in trained_modules(trainer) for tensor in (*module.parameters(), *module.buffers()))
    sizes = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_cuda}
    own = sum(sizes.values())
    others = max(0, torch.cuda.memory_allocated(device) - own)
    held: int = torch.cuda.memory_reserved(device) - others
    return held


def _shared_host(hardware: Hardware, args: Any) -> Hardware:
    """Ranks of one machine share its memory; where they compute on the CPU each has its part of it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if hardware.gpus or ranks <= 1:
        return hardware
    host = hardware.host
    return replace(hardware, host=replace(host, ram_free_bytes=host.ram_free_bytes // ranks, cores=max(1.0, host.cores / ranks)))


def from_live(source: Any, request: Request) -> Subject:
    """`source` is a Trainer, or a TrainingArguments when `request.model` names the model."""
    if dataclasses.is_dataclass(source) and hasattr(source, "per_device_train_batch_size"):
        return _from_arguments(source, request)
    if hasattr(source, "args") and hasattr(source, "model"):
        return _from_trainer(source, request)
    raise ConfigError(
        f"a {type(source).__name__} cannot be planned", hint="give a path to a YAML, a TrainingArguments with model=..., or a Trainer"
    )


def _from_arguments(args: Any, request: Request) -> Subject:
    if request.model is None:
        raise ConfigError("which model is trained is not stated", hint="hfopt.plan(args, model='bert-base-uncased')")
    hardware = hardware_of(request)
    model = ModelSpec(name=request.model, task=request.task, trust_remote_code=request.trust_remote_code)
    job = _job(args, request, model=model, data=DataSpec(max_length=request.seq_len), world=max(1, len(hardware.gpus)))
    kind = next((_KINDS[name] for base in type(args).__mro__ if (name := base.__name__.replace("Config", "Trainer")) in _KINDS), None)
    if kind is not None:  # TRL's trainer loads a model that it is given by name in its own way
        job = with_raw(replace(job, trainer=kind, uses_trl=True, model=replace(model, weights_dtype=trl_dtype())), job.raw)
    return Subject(job=job, workload=workload_of(job), hardware=hardware)


def _from_trainer(trainer: Any, request: Request) -> Subject:
    from hfopt.model.from_trainer import from_trainer
    from hfopt.model.samples import collator_of

    hardware = live_hardware(trainer, request)
    workload = from_trainer(trainer)
    world = data_parallel_world(trainer) if not hardware.hypothetical else max(1, len(hardware.gpus))
    job = _job(
        trainer.args, request, model=ModelSpec(name=workload.name), data=DataSpec(samples=_samples(trainer.train_dataset)), world=world
    )
    kept, feeding = kept_keys(trainer), feeding_limits(trainer)
    job = replace(
        with_raw(replace(job, trainer=kind_of(trainer)), {**job.raw, **_in_force(trainer)}),
        kept=job.kept | kept.keys | feeding.keys,
        evaluation=_evaluation(trainer),
    )
    return Subject(
        job=job,
        workload=workload,
        hardware=hardware,
        dataset=trainer.train_dataset,
        collate=collator_of(trainer),
        most_workers=feeding.most_workers,
        notes=(*kept.notes, *feeding.notes),
        trainer=trainer,
    )


def _job(args: Any, request: Request, *, model: ModelSpec, data: DataSpec, world: int) -> TrainJob:
    """Only what differs from the Trainer's own defaults counts as set, as in a YAML; a subclass may have others (TRL's do)."""
    from transformers import TrainingArguments

    defaults = {item.name: item.default for kind in (type(args), TrainingArguments) for item in dataclasses.fields(kind)}
    values = {item.name: _plain(getattr(args, item.name, None)) for item in dataclasses.fields(args) if item.init}
    stated = {name: value for name, value in values.items() if value is not None and value != _plain(defaults.get(name))}
    return TrainJob(
        path=None,
        section=(),
        trainer="Trainer",
        raw=stated,
        settings=trainer_settings(stated),
        model=model,
        data=data,
        per_device_batch=int(args.per_device_train_batch_size),
        accumulation=int(args.gradient_accumulation_steps),
        world_size=world,
        kept=request.keep,
    )


def _in_force(trainer: Any) -> dict[str, Any]:
    """What the Trainer does whatever its arguments say: a launcher's precision, checkpointing switched on by hand."""
    found: dict[str, Any] = {}
    precision = getattr(getattr(trainer.accelerator, "state", None), "mixed_precision", "no")
    if precision in ("bf16", "fp16"):
        found[precision] = True
    if is_checkpointing(trainer.model):
        found["gradient_checkpointing"] = True
    return found


def _plain(value: Any) -> Any:
    """Enums as the words a YAML has."""
    return getattr(value, "value", value)


def _samples(data: Any) -> int | None:
    return len(data) if hasattr(data, "__len__") else None


def _evaluation(trainer: Any) -> EvaluationSpec:
    """Several evaluation sets come one after the other: the largest counts."""
    data = getattr(trainer, "eval_dataset", None)
    sizes = [_samples(one) for one in (data.values() if isinstance(data, dict) else [data])]
    known = [size for size in sizes if size is not None]
    computes = getattr(trainer, "compute_metrics", None) is not None
    return EvaluationSpec(samples=max(known, default=None) if len(known) == len(sizes) else None, computes_metrics=computes)
