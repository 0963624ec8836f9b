"""Allocated memory over the batch size as the upper envelope of straight lines: one per event, few of them ever highest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfopt.memory.timeline import Timeline

if TYPE_CHECKING:
    import numpy as np


def running_lines(timeline: Timeline) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Live bytes after each event as lines over the batch, rounding left out (the anchors put it back)."""
    import numpy as np

    constants, slopes = timeline.constants.copy(), timeline.slopes.copy()
    for index, formula in timeline.formulas.items():
        low, high = formula.bytes(8), formula.bytes(64)
        slopes[index] = (high - low) / 56
        constants[index] = low - slopes[index] * 8
    taken: dict[int, int] = {}
    for event, (block, freed) in enumerate(zip(timeline.blocks.tolist(), timeline.is_free.tolist(), strict=True)):
        if freed:
            birth = taken[block]
            constants[event], slopes[event] = -constants[birth], -slopes[birth]
        else:
            taken[block] = event
    return np.cumsum(constants), np.cumsum(slopes)


def upper_envelope(constants: np.ndarray[Any, Any], slopes: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The lines that are highest somewhere for batch > 0: the upper hull, by increasing slope."""
    import numpy as np

    order = np.lexsort((constants, slopes))
    hull: list[int] = []
    for index in order.tolist():
        while hull and (slopes[hull[-1]] == slopes[index] or constants[hull[-1]] <= constants[index]):
            hull.pop()  # same slope and lower, or lower everywhere that counts
        while len(hull) > 1 and _crosses_before(constants, slopes, hull[-2], hull[-1], index):
            hull.pop()
        hull.append(index)
    return constants[hull], slopes[hull]


def _crosses_before(constants: Any, slopes: Any, a: int, b: int, c: int) -> bool:
    """Does line c pass a before b does? Then b is never highest."""
    return bool((constants[a] - constants[c]) * (slopes[b] - slopes[a]) <= (constants[a] - constants[b]) * (slopes[c] - slopes[a]))
