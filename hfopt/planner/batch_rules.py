"""What a trainer demands of its batches, beside their product: GRPO's groups and what it generates at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from hfopt.schema import TrainJob

_GENERATIONS = 8  # TRL's default of num_generations


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRule:
    """What a trainer demands of the per-device batch."""

    multiple: int = 1  # batch × world is a multiple of this
    divides: int | None = None  # the batch divides this
    keeps_pair: bool = False
    notes: tuple[str, ...] = ()


def batch_rule(job: TrainJob) -> BatchRule:
    """GRPO generates once for `generation_batch_size` completions, whole groups of `num_generations`, and cuts them into micro-batches.

    Stated as a size it must divide into micro-batches; stated as steps it would change with the batch, which therefore stays; left to TRL
    it is the effective batch, which no candidate changes. Before TRL 0.16 each global batch had to hold whole groups.
    """
    if job.trainer != "GRPO":
        return BatchRule()
    args = job.args
    size, steps = args.get("generation_batch_size"), args.get("steps_per_generation")
    if isinstance(size, int):
        return BatchRule(divides=max(1, size // job.world_size))
    if steps is not None:
        return BatchRule(keeps_pair=True, notes=("steps_per_generation × batch is what is generated at once, so the batch stays",))
    return BatchRule(multiple=_groups(args) if _old_trl() else 1)


def _groups(args: Mapping[str, Any]) -> int:
    return int(args.get("num_generations") or _GENERATIONS)


def _old_trl() -> bool:
    try:
        version = metadata.version("trl")
    except metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < (0, 16)
