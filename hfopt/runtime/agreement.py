"""Data-parallel ranks agree, before gradients are synchronised, whether one of them ran out of memory.

DDP starts to exchange gradients in the backward of a window's last micro-batch. A rank that is missing there leaves the others waiting
for ever. So just before it every rank gives one word (a few integers, the minimum over the ranks taken on a CPU group of its own, so no
device is waited for): all well, or the size it has to go down to. If one failed, all leave their step and repeat it together. Earlier
micro-batches exchange nothing: there a rank recovers alone. Once the exchange has begun it cannot be called off: an OOM in it ends the
process, and with it all ranks.

DDP's forward may exchange too (buffers, once per window; the bucket layout, once per run). A rank that failed before it came to its
forward joins that exchange first, and no rank repeats it: `entered` and `settle` see to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WHOLE = 1 << 40  # larger than any batch: "I need no smaller pieces"


class PeerFailed(RuntimeError):  # noqa: N818 - it is an answer, not a fault
    """Another rank ran out of memory; `word` says what all do now."""

    def __init__(self, word: Word) -> None:
        super().__init__("another rank ran out of memory")
        self.word = word


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """What a rank says; the minimum over the ranks is what all do."""

    well: bool = True
    size: int = WHOLE
    without_checkpointing: bool = True
    alive: bool = True  # False: a rank cannot go on, so all end


class Ranks:
    """This process among the data-parallel ones."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_gloo_available() else None
        self._followed: Any = None
        self.entered = False  # the forward has been reached in this window
        self.synchronising = False  # the exchange of gradients has begun
        self.collectives_seen = 0

    def follow(self, model: Any) -> None:
        """Notices when the wrapped model's forward begins."""
        if not isinstance(model, DistributedDataParallel) or model is self._followed:
            return
        self._followed = model
        model.module.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        self.entered = True

    @property
    def syncs(self) -> bool:
        """The next backward would exchange gradients."""
        return self._followed is not None and bool(self._followed.require_backward_grad_sync)

    def agree(self, word: Word) -> Word:
        numbers = torch.tensor([word.well, word.size, word.without_checkpointing, word.alive], dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._group)
        well, size, without_checkpointing, alive = numbers.tolist()
        return Word(well=bool(well), size=size, without_checkpointing=bool(without_checkpointing), alive=bool(alive))

    def join_forward(self) -> None:
        """The exchanges at the start of DDP's forward, for a rank that did not get that far."""
        if self._followed is not None and not self.entered:
            self._followed._pre_forward()
            self.entered = True

    def settle(self) -> None:
        """No rank exchanges buffers again in this window: all did, or all do when they come to their first forward."""
        if self._followed is not None and self.entered:
            self._followed.require_forward_param_sync = False
