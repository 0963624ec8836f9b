"""One accumulation window: the micro-batches between two optimizer steps, kept so that the step can be run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hfopt.oom import chunks
from hfopt.oom.chunks import Inputs
from hfopt.oom.counters import Snapshot
from hfopt.oom.replan import Refusal
from hfopt.oom.rng import RngState


@dataclass(kw_only=True, slots=True)
class Window:
    """The dicts are copies, the tensors are the Trainer's own, which it holds as long as we do: no memory is added."""

    batches: list[Inputs]
    written: list[tuple[int, ...]]
    size: int | None  # samples per piece, None: whole micro-batches
    index: int = 0  # of the micro-batch that runs
    rng: RngState | None = None
    counters: Snapshot = field(default_factory=dict)
    attempts: int = 0
    cleared: set[int] = field(default_factory=set)  # sizes that were tried again after clearing
    failed: bool = False

    @classmethod
    def of(cls, batches: Sequence[Any], size: int | None) -> Window:
        return cls(batches=[chunks.shallow_copy(b) for b in batches], written=[chunks.versions(b) for b in batches], size=size)

    @property
    def last(self) -> bool:
        return self.index == len(self.batches) - 1

    @property
    def done(self) -> bool:
        return self.index >= len(self.batches)

    def changed_in_place(self) -> Refusal | None:
        """A tensor the model has written to is not the input any more."""
        for inputs, before in zip(self.batches[: self.index + 1], self.written, strict=False):
            if chunks.versions(inputs) != before:
                return Refusal(name="inputs_written", reason="the model writes to its inputs in place, so they cannot be given to it again")
        return None
