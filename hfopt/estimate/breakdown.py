"""What is live at one moment of the timeline, by kind."""

from __future__ import annotations

from hfopt.estimate.timeline import FREED, Timeline

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
