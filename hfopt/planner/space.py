"""The search space: every way to make the same effective batch, in every precision and checkpointing the card and the user allow.

The effective batch is a law: per-device batch × accumulation × world is the same for every candidate, so only exact divisors appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfopt.errors import ConfigError
from hfopt.schema import Candidate, Checkpointing, Precision


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    if number < 1:
        raise ValueError(f"{number} has no divisors here")
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(small + [number // d for d in reversed(small) if d * d != number])


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be chosen. A pinned value is the user's and the only one tried; `batch_multiple` and
    `batch_divides` are what the trainer demands of a batch."""

    effective_batch: int
    world_size: int
    precisions: tuple[Precision, ...]
    checkpointings: tuple[Checkpointing, ...]
    batch: int | None = None
    accumulation: int | None = None
    batch_multiple: int = 1
    batch_divides: int | None = None
    optims: tuple[str | None, ...] = (None,)
    attention: tuple[str | None, ...] = (None,)
    compiled: tuple[bool, ...] = (False,)
    liger: tuple[bool, ...] = (False,)


def micro_batches(space: Space) -> tuple[int, ...]:
    """The per-device batches that keep the effective batch, largest first."""
    if space.effective_batch % space.world_size:
        raise ConfigError(
            f"the effective batch {space.effective_batch} cannot be shared by {space.world_size} devices",
            hint=f"Use {_nearest_counts(space)} devices, or ask for another effective batch with --effective-batch.",
        )
    per_device = space.effective_batch // space.world_size
    return tuple(
        batch
        for batch in reversed(divisors(per_device))
        if space.batch in (None, batch)
        and space.accumulation in (None, per_device // batch)
        and (batch * space.world_size) % space.batch_multiple == 0
        and (space.batch_divides is None or space.batch_divides % batch == 0)
    )


def candidates(space: Space) -> tuple[Candidate, ...]:
    """Every point of the space; the product is small because only divisors count."""
    batches = micro_batches(space)
    if not batches:
        raise ConfigError(
            f"no batch size keeps the effective batch {space.effective_batch} on {space.world_size} device(s) and what was asked to stay",
            hint="Leave per_device_train_batch_size or gradient_accumulation_steps free, or ask for another --effective-batch.",
        )
    per_device = space.effective_batch // space.world_size
    return tuple(
        Candidate(
            per_device_batch=batch,
            accumulation=per_device // batch,
            precision=precision,
            checkpointing=checkpointing,
            optim=optim,
            attn_implementation=attention,
            torch_compile=compiled,
            use_liger_kernel=liger,
        )
        for precision in space.precisions
        for checkpointing in space.checkpointings
        for optim in space.optims
        for attention in space.attention
        for compiled in space.compiled
        for liger in space.liger
        for batch in batches
    )


def checkpointing_choices(current: Checkpointing, *, possible: bool, graded: bool, layers: int | None) -> tuple[Checkpointing, ...]:
    """None, each second layer where the installed transformers can do it, and full; the reentrant mode is the user's."""
    if not possible:
        return (Checkpointing(),)
    steps = [0, 1]
    if graded and layers is not None and layers >= 4:
        steps.insert(1, 2)
    found = [Checkpointing(every_n_layers=n, use_reentrant=current.use_reentrant if n else False) for n in steps]
    return tuple(_unique([*found, current]))


def _unique(items: Iterable[Checkpointing]) -> list[Checkpointing]:
    return list(dict.fromkeys(items))


def _nearest_counts(space: Space) -> str:
    counts: Sequence[int] = [d for d in divisors(space.effective_batch) if d <= 2 * space.world_size]
    return " or ".join(str(count) for count in counts[-2:])
