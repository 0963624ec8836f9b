"""Who owns which gradient under ZeRO-2: each group's weights lie one after the other in a flat tensor that is cut into equal parts.

A weight may cross a border, and its gradient is then kept whole by both neighbours (stage_1_and_2.py, `copy_grads_in_partition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise


class Layout:
    """The parts of the flat groups, in elements."""

    def __init__(self, groups: Sequence[Sequence[int]], world: int) -> None:
        self._world = world
        self._parts: list[list[range]] = []  # the ranks that own a part of each weight
        self._pieces: list[list[int]] = []  # the largest part of each weight that one rank owns
        for sizes in groups:
            part = max(1, -(-sum(sizes) // world))
            ends = list(accumulate(sizes))
            self._parts.append([range((end - size) // part, -(-end // part)) for size, end in zip(sizes, ends, strict=True)])
            self._pieces.append([max(_cut(end - size, end, part)) for size, end in zip(sizes, ends, strict=True)])
        self._sizes = groups

    @property
    def largest_kept(self) -> int:
        """The gradients the fullest rank keeps."""
        kept = [0] * self._world
        for sizes, parts in zip(self._sizes, self._parts, strict=True):
            for size, ranks in zip(sizes, parts, strict=True):
                for rank in ranks:
                    kept[rank] += size
        return max(kept)

    def pieces(self, bucket: Sequence[tuple[int, int]]) -> int:
        """Stretches of a bucket that belong to one rank each; a weight is named by its group and its place there."""
        owners = [rank for group, place in bucket for rank in self._parts[group][place]]
        return sum(1 for _ in groupby(owners))

    def largest_pieces(self, bucket: Sequence[tuple[int, int]]) -> list[int]:
        return [self._pieces[group][place] for group, place in bucket]


def _cut(start: int, end: int, part: int) -> list[int]:
    """The lengths of a stretch cut at the multiples of `part`."""
    borders = [start, *range(-(-(start + 1) // part) * part, end, part), end]
    return [after - before for before, after in pairwise(borders)]
