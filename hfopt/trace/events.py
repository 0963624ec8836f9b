"""What a trace holds: the blocks that were taken and freed, in order, where each was taken, and sizes that follow a formula.

Plain values: they are recorded with torch (`recorder`), and read without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hfopt.trace.kernel_sizes import Formula

Phase = Literal["load", "forward", "backward", "optimizer", "evaluation"]
Category = Literal["weights", "gradients", "optimizer", "activations", "logits", "inputs", "temporaries"]

FREED = -1


@dataclass(frozen=True, slots=True)
class Where:
    """What ran when a block was taken."""

    phase: Phase
    module: str
    op: str


@dataclass(slots=True)
class Trace:
    """One recorded run: events in order, each (block, bytes or FREED, index into places)."""

    batch: int
    events: list[tuple[int, int, int]] = field(default_factory=list)
    formulas: dict[int, Formula] = field(default_factory=dict)  # by event: sizes that are no affine function of the batch
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by event, of tensors with several dimensions
    places: list[Where] = field(default_factory=list)
    categories: dict[int, Category] = field(default_factory=dict)  # by block
    costs: list[tuple[Phase, str, Any]] = field(default_factory=list)  # phase, op and cost of each kernel while `costing` is on
    marks: dict[str, int] = field(default_factory=dict)  # named moments, as event indices
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream

    def sort_frees(self) -> None:
        """Blocks freed one after the other leave the same free memory in any order; sorted, two traces compare. Marks stay between."""
        start = 0
        events, marked = self.events, set(self.marks.values())
        for index, (_, size, _) in enumerate([*events, (0, 0, 0)]):
            if size != FREED or index in marked:
                if index - start > 1:
                    events[start:index] = sorted(events[start:index])
                start = index if size == FREED else index + 1
