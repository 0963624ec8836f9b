"""One timeline for every batch size: two traces matched event by event, each size as constant + slope × batch.

A third trace at another batch size checks the match. Where a size is no affine function (a padded or value-dependent shape), the line
through the two traces is used, rounded, and `inexact` counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.estimate.formulas import FORMULAS

if TYPE_CHECKING:
    import numpy as np

    from hfopt.estimate.trace import Category, Trace, Where

FREED = -1


@dataclass(frozen=True, slots=True)
class AffineFormula:
    name: str
    dims: tuple[tuple[int, int], ...]  # (constant, slope) each

    def bytes(self, batch: int) -> int:
        return FORMULAS[self.name](*(constant + slope * batch for constant, slope in self.dims))


@dataclass(frozen=True, slots=True)
class Timeline:
    blocks: np.ndarray[Any, Any]  # which block each event takes or frees
    is_free: np.ndarray[Any, Any]
    constants: np.ndarray[Any, Any]
    slopes: np.ndarray[Any, Any]
    places: list[Where]
    place_of: np.ndarray[Any, Any]
    categories: dict[int, Category]
    marks: dict[str, int]
    formulas: dict[int, AffineFormula] = field(default_factory=dict)
    inexact: int = 0
    traced: tuple[int, ...] = ()
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream

    def __len__(self) -> int:
        return len(self.blocks)

    def sizes(self, batch: int) -> list[int]:
        """The bytes of each event at a batch size; FREED for a free."""
        import numpy as np

        sizes = np.rint(self.constants + self.slopes * batch).astype(np.int64)
        sizes[self.is_free] = FREED
        out: list[int] = sizes.tolist()
        for index, formula in self.formulas.items():
            out[index] = formula.bytes(batch)
        return out


def combine(first: Trace, second: Trace, third: Trace | None = None) -> Timeline:
    """Matches the traces; raises TraceError when they are not the same sequence of events."""
    import numpy as np

    _require_same_shape(first, second)
    span = second.batch - first.batch
    one = np.array([size for _, size, _ in first.events], dtype=np.int64)
    two = np.array([size for _, size, _ in second.events], dtype=np.int64)
    slopes = (two - one) / span
    constants = one - slopes * first.batch
    formulas = {}
    for index, formula in first.formulas.items():
        other = second.formulas[index]
        dims = []
        for a, b in zip(formula.dims, other.dims, strict=True):
            slope = (b - a) // span
            dims.append((a - slope * first.batch, slope))
        formulas[index] = AffineFormula(formula.name, tuple(dims))
    timeline = Timeline(
        blocks=np.array([block for block, _, _ in first.events], dtype=np.int64),
        is_free=one == FREED,
        constants=constants,
        slopes=slopes,
        places=first.places,
        place_of=np.array([place for _, _, place in first.events], dtype=np.int64),
        categories=first.categories,
        marks=first.marks,
        formulas=formulas,
        inexact=int(np.count_nonzero(two - one - span * np.rint(slopes))),
        traced=(first.batch, second.batch),
        streams=first.streams,
    )
    if third is None:
        return timeline
    _require_same_shape(first, third)
    wrong = sum(a != b for a, b in zip(timeline.sizes(third.batch), (size for _, size, _ in third.events), strict=True))
    return _replace(timeline, inexact=max(timeline.inexact, wrong), traced=(first.batch, second.batch, third.batch))


def _replace(timeline: Timeline, **changes: Any) -> Timeline:
    from dataclasses import replace

    return replace(timeline, **changes)


def _require_same_shape(first: Trace, second: Trace) -> None:
    pairs: Sequence[Any] = list(zip(first.events, second.events, strict=False))
    for index, (a, b) in enumerate(pairs):
        if a[0] != b[0] or (a[1] == FREED) != (b[1] == FREED):
            place = first.places[a[2]]
            where = f"{place.op} in {place.module or 'the model'}"
            raise _differs(first, second, f"first at {where} (event {index})")
    if len(first.events) != len(second.events):
        raise _differs(first, second, f"{len(first.events)} against {len(second.events)} events")


def _differs(first: Trace, second: Trace, how: str) -> TraceError:
    return TraceError(
        f"the model does different things at batch {first.batch} and {second.batch}: {how}",
        hint="its control flow depends on the batch size or on the data, so one trace cannot speak for all batch sizes",
    )
