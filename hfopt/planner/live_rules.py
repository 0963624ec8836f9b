"""What a live Trainer does not let a plan change, and what its data does not; each with the words that say so."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from hfopt.planner.changes import PRECISION_KEYS

BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps")
Kind = Literal["Trainer", "Seq2SeqTrainer", "SFT", "DPO", "GRPO", "Reward", "KTO"]
_KINDS: dict[str, Kind] = {
    "Seq2SeqTrainer": "Seq2SeqTrainer",
    "SFTTrainer": "SFT",
    "DPOTrainer": "DPO",
    "GRPOTrainer": "GRPO",
    "RewardTrainer": "Reward",
    "KTOTrainer": "KTO",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    keys: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    most_workers: int | None = None


def kind_of(trainer: Any) -> Kind:
    """By the nearest known class it descends from."""
    return next((_KINDS[base.__name__] for base in type(trainer).__mro__ if base.__name__ in _KINDS), "Trainer")


def data_parallel_world(trainer: Any) -> int:
    """Ranks that share a sample (tensor, context, sequence parallel) do not multiply the batch."""
    world = int(getattr(trainer.args, "world_size", 1)) * max(1, int(getattr(trainer.args, "n_gpu", 1)))  # DataParallel's replicas count
    for size in ("get_tp_size", "get_cp_size", "get_sp_size"):
        if hasattr(trainer, size):
            world //= max(1, int(getattr(trainer, size)()))
    return max(1, world)


def kept_keys(trainer: Any) -> Kept:
    """What was fixed when the Trainer was made."""
    keys: set[str] = set()
    notes: list[str] = []
    if getattr(trainer, "is_deepspeed_enabled", False):
        keys.update(BATCH_KEYS, PRECISION_KEYS)
        notes.append("DeepSpeed has already read batch, accumulation and precision from its own config: they stay")
    elif getattr(trainer.accelerator, "_models", None):
        keys.update(PRECISION_KEYS)
        notes.append("another model (a reference) is already prepared in the Trainer's precision, which stays")
    elif os.environ.get("ACCELERATE_MIXED_PRECISION", "no") not in ("no", _stated_precision(trainer.args)):
        keys.update(PRECISION_KEYS)
        notes.append("the launcher chose the precision (accelerate config): it stays")
    if trainer.optimizer is not None and "optim" not in keys:
        keys.add("optim")
    if getattr(trainer.args, "torch_compile", False):
        keys.update(("gradient_checkpointing", "gradient_checkpointing_kwargs"))
        notes.append("torch_compile: checkpointing stays as it is, for the compiled graph was asked for with it")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        notes.append(
            f"{trainer.args.n_gpu} GPUs in one process are DataParallel; `hfopt run --nproc {trainer.args.n_gpu}` gives each its own"
        )
    if getattr(trainer.args, "use_liger_kernel", False):
        notes.append("what liger's kernels save is not in the estimate: there is more room than it says")
    return Kept(keys=frozenset(keys), notes=tuple(notes))


def _stated_precision(args: Any) -> str:
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"


def feeding_limits(trainer: Any) -> Kept:
    """A stream is divided among workers by its shards; one that is not divisible would be read once by each of them."""
    from torch.utils.data import IterableDataset

    data = trainer.train_dataset
    if not isinstance(data, IterableDataset):
        return Kept()
    shards = getattr(data, "num_shards", None) or getattr(data, "n_shards", None)
    if isinstance(shards, int):
        most = max(1, shards // max(1, data_parallel_world(trainer)))
        return Kept(
            most_workers=most, notes=(f"the data is a stream of {shards} shard{'s' if shards != 1 else ''}: at most {most} workers",)
        )
    note = "the data is an IterableDataset of its own making, which every worker would read from its start: the workers stay"
    return Kept(keys=frozenset({"dataloader_num_workers"}), notes=(note,))
