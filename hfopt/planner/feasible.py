"""Which candidates fit: each is held against the largest batch its memory curve allows, and a rejected one keeps its reason.

The curve answers once per setting (precision, checkpointing, ...), not once per candidate, so a hundred times the candidates cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hfopt.schema import Candidate, Rejection
from hfopt.units import format_bytes

LargestBatch = Callable[[Candidate], int | None]
"""The largest per-device batch that fits with this candidate's other settings; None when not even one sample does."""


def split(
    candidates: Iterable[Candidate], largest_batch: LargestBatch, budget_bytes: int
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that fit, and the others with the reason. Order is kept."""
    fitting: list[Candidate] = []
    rejected: list[Rejection] = []
    for candidate in candidates:
        limit = largest_batch(candidate)
        if limit is not None and candidate.per_device_batch <= limit:
            fitting.append(candidate)
        else:
            rejected.append(Rejection(candidate=candidate, reason=_reason(candidate, limit, budget_bytes)))
    return tuple(fitting), tuple(rejected)


def _reason(candidate: Candidate, limit: int | None, budget_bytes: int) -> str:
    budget = format_bytes(budget_bytes)
    if limit is None:
        return f"not even one sample fits into {budget}"
    return f"batch {candidate.per_device_batch} does not fit into {budget}: at most {limit} with these settings"


def bound_reason(candidate: Candidate, at_most: int, budget_bytes: int) -> str:
    """For one that was not traced, above a bound that no batch passes: less may be too much as well."""
    if not at_most:
        return _reason(candidate, None, budget_bytes)
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at most {at_most}, perhaps fewer"


def hole_reason(candidate: Candidate, budget_bytes: int) -> str:
    """For one that its settings' largest batch would let in."""
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at this batch more is kept in the cache"


def budget_bytes(free_bytes: int, headroom: float) -> int:
    """What may be planned with: the free memory less a share kept for what no estimate sees (longer samples, other processes)."""
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom is a share between 0 and 1, not {headroom}")
    return int(free_bytes * (1 - headroom))
