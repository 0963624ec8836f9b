"""The window of an optimizer step as the Trainer holds it: each of its batches on the device, and a third micro-batch that follows.

A step with accumulation is traced with two micro-batches at most. `get_batch_samples` (transformers 4.46 on) fetches all of a window's
batches before the first one runs, while those of the window before are still there, and where they are large (images) they lie between the
blocks that the step wants back. And the second micro-batch, which is the first to find gradients, does not always leave the cache as it
found it: the third may need one more segment, all later ones do as the third does. So what a trace lacks is put into its timeline: copies
of a batch's inputs, and the second micro-batch once more.

Known limit: a step of one rank of several gets its inputs, not a third micro-batch: there the last one also exchanges gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from hfopt.memory.timeline import AffineFormula, Timeline

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Known = TypeVar("Known")


def fetched_inputs(timeline: Timeline, step: int) -> list[list[int]]:
    """The events that take each batch of a step's window; none where the timeline does not show them."""
    marks = timeline.marks
    starts = sorted(event for name, event in marks.items() if name.startswith(f"fetch_{step}_"))
    if not starts:
        return []
    ends = [*starts[1:], marks.get(f"step_{step}_micro_0", 0)]
    batches = [[event for event in range(*span) if _takes_input(timeline, event)] for span in zip(starts, ends, strict=True)]
    return batches if all(batches) else []


def _takes_input(timeline: Timeline, event: int) -> bool:
    return not timeline.is_free[event] and timeline.categories.get(int(timeline.blocks[event])) == "inputs"


def whole_window(timeline: Timeline, batches: int, *, third: bool) -> Timeline | None:
    """The timeline with so many batches in each window, and a third micro-batch where there are more than two. The timeline itself where
    nothing is to be added, None where it does not show its windows."""
    fetched = [fetched_inputs(timeline, step) for step in (0, 1)]
    if not fetched[0] or len(fetched[0]) != len(fetched[1]):
        return None
    more, traced = batches - len(fetched[0]), sum(name.startswith("step_1_micro_") for name in timeline.marks)
    repeats = third and traced == 2 < batches
    return _Longer(timeline).with_batches(fetched, max(0, more), third=repeats) if more > 0 or repeats else timeline


class _Longer:
    """The longer timeline as it grows: stretches of the traced one, and between them copies with blocks of their own."""

    def __init__(self, timeline: Timeline) -> None:
        self._traced = timeline
        self._next_block = timeline.next_block
        self._pieces: list[tuple[Array, Array]] = []  # which events of the traced timeline, and the blocks that they take or free
        self._starts: list[tuple[int, int]] = []  # of each stretch of the traced timeline: there, and here
        self._copied: list[tuple[int, int]] = []  # the same of a copied micro-batch
        self._origins: dict[int, int] = {}  # of each new block
        self._done = self._length = 0

    def with_batches(self, fetched: list[list[list[int]]], more: int, *, third: bool) -> Timeline:
        import numpy as np

        waiting: list[int] = []
        for step, inputs in enumerate(fetched):
            first = np.array(inputs[0])
            self._up_to(inputs[0][-1] + 1)
            before, waiting = waiting, []
            for _ in range(more):
                copies = self._new_blocks(self._traced.blocks[first])
                waiting += copies.tolist()
                self._put(first, copies)
            self._up_to(inputs[-1][-1] + 1)
            if before:  # the window before is let go when this one is there
                self._put(np.full(len(before), self._a_free()), np.array(before))
            if third:
                self._repeat(self._traced.marks[f"step_{step}_micro_1"])
        self._up_to(len(self._traced))
        return self._made()

    def _a_free(self) -> int:
        """Any event that frees: where it stood does not matter."""
        return int(self._traced.is_free.argmax())

    def _up_to(self, event: int) -> None:
        import numpy as np

        span = np.arange(self._done, event)
        self._starts.append((self._done, self._length))
        self._put(span, self._traced.blocks[span])
        self._done = event

    def _repeat(self, begin: int) -> None:
        """The micro-batch that begins there, once more: what it takes and keeps is let go at its end, whose blocks it frees are gone."""
        import numpy as np

        end = self._update_after(begin)
        self._up_to(end)
        span = np.arange(begin, end)
        blocks, freed = self._traced.blocks[span], self._traced.is_free[span]
        own = np.unique(blocks[~freed])
        span, blocks, freed = (one[np.isin(blocks, own)] for one in (span, blocks, freed))
        copies = self._new_blocks(own)
        renamed = copies[np.searchsorted(own, blocks)]
        self._copied += zip(span.tolist(), range(self._length, self._length + len(span)), strict=True)
        self._put(span, renamed)
        kept = copies[~np.isin(own, blocks[freed])]
        self._put(np.full(len(kept), self._a_free()), kept)

    def _update_after(self, event: int) -> int:
        """Where the optimizer first takes something."""
        timeline = self._traced
        for at in range(event, len(timeline)):
            if not timeline.is_free[at] and timeline.places[int(timeline.place_of[at])].phase == "optimizer":
                return at
        return event

    def _new_blocks(self, like: Array) -> Array:
        import numpy as np

        made = np.arange(self._next_block, self._next_block + len(like))
        self._next_block += len(like)
        self._origins.update(zip(made.tolist(), like.tolist(), strict=True))
        return made

    def _put(self, events: Array, blocks: Array) -> None:
        self._pieces.append((events, blocks))
        self._length += len(events)

    def _made(self) -> Timeline:
        import numpy as np

        timeline = self._traced
        order = np.concatenate([events for events, _ in self._pieces])
        return Timeline(
            blocks=np.concatenate([blocks for _, blocks in self._pieces]),
            is_free=timeline.is_free[order],
            constants=timeline.constants[order],
            slopes=timeline.slopes[order],
            places=timeline.places,
            place_of=timeline.place_of[order],
            categories=timeline.categories | self._of_copies(timeline.categories),
            marks={name: self._now_at(event) for name, event in timeline.marks.items()},
            formulas=dict(self._formulas()),
            streams=timeline.streams | self._of_copies(timeline.streams),
        )

    def _of_copies(self, known: dict[int, Known]) -> dict[int, Known]:
        return {made: known[origin] for made, origin in self._origins.items() if origin in known}

    def _now_at(self, event: int) -> int:
        there, here = max(start for start in self._starts if start[0] <= event)
        return here + event - there

    def _formulas(self) -> Iterator[tuple[int, AffineFormula]]:
        known = self._traced.formulas
        for event, formula in known.items():
            yield self._now_at(event), formula
        for event, now_at in self._copied:
            if event in known:
                yield now_at, known[event]
