"""One timeline for every batch size: two traces matched event by event, each size as constant + slope × batch.

Sizes that a kernel computes in another way keep their formula. Where the traces are not the same sequence of events there is no timeline
(`coarse` has a rougher answer).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hfopt.errors import TraceError
from hfopt.trace.cuda_allocations import FORMULAS

if TYPE_CHECKING:
    import numpy as np

    from hfopt.trace.recorder import Category, Trace, Where

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
    streams: dict[int, int] = field(default_factory=dict)  # by block, where it is not the usual stream

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def next_block(self) -> int:
        """No block has this number or a higher one."""
        return int(self.blocks.max()) + 1

    def sizes(self, batch: int) -> list[int]:
        """The bytes of each event at a batch size; FREED for a free."""
        import numpy as np

        sizes = np.rint(self.constants + self.slopes * batch).astype(np.int64)
        sizes[self.is_free] = FREED
        out: list[int] = sizes.tolist()
        for index, formula in self.formulas.items():
            out[index] = formula.bytes(batch)
        return out


def combine(first: Trace, second: Trace) -> Timeline:
    """Matches the traces; raises TraceError when they are not the same sequence of events."""
    require_same_events(first, second, f"batch {first.batch} and {second.batch}")
    formulas = {}
    for index, formula in first.formulas.items():
        pairs = zip(formula.dims, second.formulas[index].dims, strict=True)
        lines = ((a, (b - a) // (second.batch - first.batch)) for a, b in pairs)
        formulas[index] = AffineFormula(formula.name, tuple((a - slope * first.batch, slope) for a, slope in lines))
    slopes = (_sizes(second) - _sizes(first)) / (second.batch - first.batch)
    return _timeline(first, slopes, formulas)


def alone(trace: Trace) -> Timeline:
    """One trace, right at its own batch size only."""
    formulas = {index: AffineFormula(one.name, tuple((dim, 0) for dim in one.dims)) for index, one in trace.formulas.items()}
    return _timeline(trace, _sizes(trace) * 0.0, formulas)


def _timeline(trace: Trace, slopes: np.ndarray[Any, Any], formulas: dict[int, AffineFormula]) -> Timeline:
    import numpy as np

    sizes = _sizes(trace)
    return Timeline(
        blocks=np.array([block for block, _, _ in trace.events], dtype=np.int64),
        is_free=sizes == FREED,
        constants=sizes - slopes * trace.batch,
        slopes=slopes,
        places=trace.places,
        place_of=np.array([place for _, _, place in trace.events], dtype=np.int64),
        categories=trace.categories,
        marks=trace.marks,
        formulas=formulas,
        streams=trace.streams,
    )


def _sizes(trace: Trace) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.array([size for _, size, _ in trace.events], dtype=np.int64)


def require_same_events(first: Trace, second: Trace, where: str) -> None:
    """The same blocks taken and freed in the same order; TraceError says at which `where` they part."""
    for index, (a, b) in enumerate(zip(first.events, second.events, strict=False)):
        if a[0] != b[0] or (a[1] == FREED) != (b[1] == FREED):
            place = first.places[a[2]]
            raise _differs(where, f"first at {place.op} in {place.module or 'the model'} (event {index})")
    if len(first.events) != len(second.events) or first.formulas.keys() != second.formulas.keys():
        raise _differs(where, f"{len(first.events)} against {len(second.events)} events")


def _differs(where: str, how: str) -> TraceError:
    return TraceError(
        f"the model does different things at {where}: {how}",
        hint="its control flow depends on the batch or on the data, so one trace cannot speak for all of them",
    )
