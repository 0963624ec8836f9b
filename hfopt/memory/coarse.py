"""A rougher curve for a model that does different things at different batch sizes: straight lines through the peaks of two traces.

Without events that match there is no timeline for other batch sizes. What is live at the peak is a line for each kind of memory, and what
the allocator holds beyond it another. It is right at the two traced sizes, and a line between and beyond them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfopt.memory.breakdown import KINDS
from hfopt.memory.timeline import Timeline
from hfopt.schema import MemoryPeak

if TYPE_CHECKING:
    from hfopt.trace.recorder import Category

COARSE_BATCH = 8  # the second size traced: far enough from the first that a jump does not become a slope
COARSE_NOTE = "a coarse estimate, a straight line through batch {} and {}: {}"


def coarse_timeline(first: MemoryPeak, second: MemoryPeak) -> Timeline:
    """One block for each kind of memory, and one for what is reserved beyond them."""
    import numpy as np

    from hfopt.trace.recorder import Where

    assert first.breakdown is not None
    assert second.breakdown is not None
    names = [*(f"{kind}_bytes" for kind in KINDS), "fragmentation_bytes"]
    one, two = (np.array([getattr(peak.breakdown, name) for name in names], dtype=np.int64) for peak in (first, second))
    slopes = np.maximum((two - one) / (second.batch - first.batch), 0.0)  # what shrinks does so once, not with every sample
    categories: dict[int, Category] = dict(enumerate(KINDS))  # type: ignore[arg-type]
    return Timeline(
        blocks=np.arange(len(names)),
        is_free=np.zeros(len(names), dtype=bool),
        constants=np.maximum(one, two - slopes * (second.batch - first.batch)) - slopes * first.batch,
        slopes=slopes,
        places=[Where("backward", "", "")],
        place_of=np.zeros(len(names), dtype=np.int64),
        categories=categories,
        marks={},
    )
