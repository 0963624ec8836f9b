"""Data-parallel ranks agree, before gradients are synchronised, whether one of them ran out of memory.

DDP exchanges gradients in the backward of a window's last micro-batch. A rank that is missing there leaves the others waiting for ever.
So just before that backward every rank gives one word (a few integers; the minimum over the ranks is taken on a CPU group of its own, so
no device is waited for): all well, or the size it has to go down to. If one failed, all leave their step and repeat it together. Earlier
micro-batches exchange nothing: there a rank recovers alone. Once the exchange has begun it cannot be called off: an OOM in it ends the
process, and with it all ranks.

DDP arms its exchange in the forward and cannot be disarmed, so the last forward is run as if it did not exchange, and the exchange is
armed after the agreement (as accelerate's `trigger_sync_in_backward` does). DDP's forward itself sends buffers around, once per window: a
rank that failed before it came to its forward joins that first (`join_forward`), and no rank repeats it (`settle`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WHOLE = 1 << 40  # larger than any batch: "I need no smaller pieces"


class PeerFailed(RuntimeError):  # noqa: N818 - it is an answer, not a fault
    """Another rank ran out of memory; `word` says what all do now."""

    def __init__(self, word: RankVote) -> None:
        super().__init__("another rank ran out of memory")
        self.word = word


@dataclass(frozen=True, kw_only=True, slots=True)
class RankVote:
    """What a rank says; the minimum over the ranks is what all do."""

    well: bool = True
    size: int = WHOLE
    without_checkpointing: bool = True
    alive: bool = True  # False: a rank cannot go on, so all end


def _leave(group: Any, owner_pid: int) -> None:
    """Before the interpreter goes: threads of gloo that outlive it abort the process, and a run that went well would end with an error.
    A fork of the script that ends leaves the group alone."""
    if dist.is_initialized() and os.getpid() == owner_pid:
        with suppress(ValueError, RuntimeError):  # the script has ended the group itself
            dist.destroy_process_group(group)


class DataParallelRanks:
    """This process among the data-parallel ones."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_gloo_available() else None
        if self._group is not None:
            atexit.register(_leave, self._group, os.getpid())
        self._model: Any = None
        self._entered = False  # the forward has been reached in this window
        self.holding = False  # the next backward is the one before which all agree
        self.exchanging = False  # it has begun

    def begin(self, model: Any, *, window_begins: bool) -> None:
        """A micro-batch begins."""
        self.exchanging = False
        if window_begins:
            self._entered = False
        if isinstance(model, DistributedDataParallel) and model is not self._model:
            self._model = model
            model.module.register_forward_pre_hook(self._on_forward)

    def _on_forward(self, module: torch.nn.Module, args: Any) -> None:
        self._entered = True

    @property
    def syncs(self) -> bool:
        """The micro-batch that runs now ends with an exchange of gradients."""
        return self._model is not None and bool(self._model.require_backward_grad_sync)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Runs the last forward without arming the exchange; `exchange` does that once all have agreed."""
        if not self.syncs:
            yield
            return
        model = self._model
        model.require_backward_grad_sync, self.holding = False, True
        try:
            yield
        finally:
            model.require_backward_grad_sync, self.holding = True, False
        model.require_forward_param_sync = True

    def exchange(self, loss: torch.Tensor) -> None:
        """Arms the exchange for the backward that follows. DDP looks for unused parameters from the loss."""
        self.holding, self.exchanging = False, True
        self._model.require_backward_grad_sync = True
        self._model.reducer.prepare_for_backward([loss] if self._model.find_unused_parameters else [])

    def agree(self, word: RankVote) -> RankVote:
        numbers = torch.tensor([word.well, word.size, word.without_checkpointing, word.alive], dtype=torch.int64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=self._group)
        well, size, without_checkpointing, alive = numbers.tolist()
        return RankVote(well=bool(well), size=size, without_checkpointing=bool(without_checkpointing), alive=bool(alive))

    def join_forward(self) -> None:
        """The exchanges at the start of DDP's forward, for a rank that did not get that far."""
        if self._model is not None and not self._entered:
            self._model._pre_forward()
            self._entered = True

    def settle(self) -> None:
        """A rank that has sent its buffers around in this window does not do so again."""
        if self._model is not None and self._entered:
            self._model.require_forward_param_sync = False
