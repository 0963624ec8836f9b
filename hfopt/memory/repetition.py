"""The second traced step again: each repetition has blocks of its own, and frees what the one before it left alive.

A step that finds the cache as the step before left it may still need another segment: what fits depends on which blocks were cut. The
first two traced steps are not alike (the optimizer's states come between them), the third shows what all later ones do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from hfopt.memory.timeline import FREED, Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

_NOBODYS = -1  # a block that was never taken: freeing it does nothing


class ThirdStep:
    """What follows the two traced steps."""

    def __init__(self, timeline: Timeline) -> None:
        repetition = Repetition(timeline)
        self._span = slice(repetition.repeated, repetition.end)
        self._left = [(block, FREED) for block in repetition.leftovers(0)]
        self._blocks = repetition.blocks(1)

    def events(self, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Each a block and a size or FREED; `sizes` are those of the whole timeline."""
        return chain(self._left, zip(self._blocks, sizes[self._span], strict=True))


class Repetition:
    """The second step, to be repeated: which of its blocks are its own, and whose blocks it frees."""

    def __init__(self, timeline: Timeline) -> None:
        import numpy as np

        marks = timeline.marks
        self.begin, self.repeated, self.end = begin, repeated, end = marks["step_0"], marks["step_1"], marks.get("step_2", marks["end"])
        self._blocks = timeline.blocks[repeated:end]
        first, second = _births(timeline, begin, repeated), _births(timeline, repeated, end)
        self._stride = timeline.next_block
        self._own = np.isin(self._blocks, list(second.values()))
        like = {block: second.get(key, _NOBODYS) for key, block in first.items()}
        self._like = np.array([like.get(block, _NOBODYS) for block in self._blocks.tolist()])
        self._carried = ~self._own & np.isin(self._blocks, list(like))
        freed = {*self._blocks[timeline.is_free[repeated:end]].tolist(), *self._like.tolist()}
        self._left = np.array([block for block in second.values() if block not in freed], dtype=np.int64)

    def blocks(self, number: int) -> list[int]:
        """The block of each event in repetition `number`; 0 is the step as traced."""
        import numpy as np

        blocks = self._blocks
        if number:
            before = np.where(self._like >= 0, self._like + (number - 1) * self._stride, _NOBODYS)
            blocks = np.where(self._own, blocks + number * self._stride, np.where(self._carried, before, blocks))
        out: list[int] = blocks.tolist()
        return out

    def leftovers(self, number: int) -> list[int]:
        """Blocks of repetition `number` that nothing would free."""
        out: list[int] = (self._left + number * self._stride).tolist()
        return out


def _births(timeline: Timeline, begin: int, end: int) -> dict[tuple[int, int], int]:
    """The blocks taken in a stretch of the timeline, by place and how many were taken there before."""
    counts: dict[int, int] = {}
    found = {}
    for block, freed, place in zip(
        timeline.blocks[begin:end].tolist(), timeline.is_free[begin:end].tolist(), timeline.place_of[begin:end].tolist(), strict=True
    ):
        if not freed:
            counts[place] = counts.get(place, 0) + 1
            found[place, counts[place]] = block
    return found
