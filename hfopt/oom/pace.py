"""How long a smaller size lasts: one window for a rare long batch, until further notice when it keeps happening, and back up when it is
quiet.

Pure. `after_window` is told of each accumulation window whether memory ran out in it and at which size it went through. A size is made
lasting once `settle_after` of the last `RECENT` windows ran out of memory. After `grow_after` quiet windows the next larger size is
tried; if memory runs out again within `settle_after` windows of that, it was too early, and the next wait is twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

RECENT = 20  # windows; with settle_after = 3, more than one window in seven running out is no longer rare
LONGEST_WAIT = 10_000  # windows; growing back is tried now and then even in a long run


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    full: int  # samples in a whole micro-batch
    settle_after: int = 3
    grow_after: int = 100
    size: int | None = None  # the lasting size; None is the whole micro-batch
    failed_sizes: tuple[int | None, ...] = ()  # of the last windows: the size a failed one went through at, None for a quiet one
    quiet: int = 0
    wait: int = 0  # quiet windows before the next try; 0 until a size was made lasting
    grown_from: int | None = None  # the size to return to when the last growth was too early

    @property
    def untroubled(self) -> bool:
        """Whole micro-batches and no failure to remember: a quiet window changes nothing."""
        return self.size is None and not self.failed_sizes and self.grown_from is None


def after_window(pace: Pace, passed_at: int | None) -> Pace:
    """`passed_at` is the size a window went through at after running out of memory, None when it did not run out."""
    if passed_at is None and pace.untroubled:
        return pace
    recent = (*pace.failed_sizes, passed_at)[-RECENT:]
    if not any(recent):
        recent = ()
    if passed_at is None:
        return _quiet(replace(pace, failed_sizes=recent))
    if pace.grown_from is not None:
        return replace(
            pace, size=min(pace.grown_from, passed_at), grown_from=None, quiet=0, wait=min(2 * pace.wait, LONGEST_WAIT), failed_sizes=()
        )
    failures = [size for size in recent if size is not None]
    if len(failures) < pace.settle_after:
        return replace(pace, failed_sizes=recent, quiet=0)
    return replace(pace, size=min(failures), failed_sizes=(), quiet=0, wait=pace.wait or pace.grow_after)


def _quiet(pace: Pace) -> Pace:
    quiet = pace.quiet + 1
    confirmed = pace.grown_from is not None and quiet >= pace.settle_after
    if pace.size is None or quiet < pace.wait:
        return replace(pace, quiet=quiet, grown_from=None if confirmed else pace.grown_from)
    larger = next((size for size in range(pace.size + 1, pace.full) if pace.full % size == 0), None)
    return replace(pace, size=larger, grown_from=pace.size, quiet=0)
