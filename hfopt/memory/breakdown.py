"""What is live at one moment of the timeline, or at all of them, by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfopt.memory.timeline import FREED, Timeline

if TYPE_CHECKING:
    import numpy as np

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "temporaries")


def live_bytes(timeline: Timeline, batch: int, event: int) -> dict[str, int]:
    """Requested bytes of every block live after `event`; the batch's inputs count as activations."""
    live: dict[int, int] = {}
    sizes = timeline.sizes(batch)
    for block, size in zip(timeline.blocks[: event + 1].tolist(), sizes, strict=False):
        if size == FREED:
            live.pop(block, None)
        else:
            live[block] = size
    totals = dict.fromkeys(KINDS, 0)
    for block, size in live.items():
        kind = timeline.categories.get(block, "temporaries")
        totals["activations" if kind == "inputs" else kind] += size
    return totals


def live_over_time(timeline: Timeline, batch: int) -> dict[str, np.ndarray[Any, Any]]:
    """The same after every event: one array over the events per kind."""
    import numpy as np

    changes = {kind: np.zeros(len(timeline), dtype=np.int64) for kind in KINDS}
    taken: dict[int, int] = {}
    for event, (block, size) in enumerate(zip(timeline.blocks.tolist(), timeline.sizes(batch), strict=True)):
        kind = timeline.categories.get(block, "temporaries")
        if size == FREED:
            size = -taken.pop(block, 0)
        else:
            taken[block] = size
        changes["activations" if kind == "inputs" else kind][event] = size
    return {kind: np.cumsum(change) for kind, change in changes.items()}
