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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hfopt.facts import oom_errors
from hfopt.facts.loss_rule import Rule
from hfopt.oom import next_settings, rank_vote, replay, split_batch
from hfopt.oom.micro_batch import ANOTHER_LOSS
from hfopt.oom.replay import AccumulationWindow
from hfopt.oom.split_batch import Inputs, structural_refusal
from hfopt.oom.step_down import Refusal

if TYPE_CHECKING:
    from hfopt.oom.guard import Failure, Guard


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


def can_be_repeated(model: Any) -> bool:
    """Whether this is a model that FSDP2 shards over one dimension, with its own exchanges, by a torch that can reset it."""
    if not hasattr(model, "reset_iter_state") or not hasattr(dist, "all_gather_single"):
        return False
    meshes = {parameter.device_mesh.ndim for parameter in model.parameters() if hasattr(parameter, "device_mesh")}
    return meshes == {1}


class Exchanges:
    """Counts the exchanges of a micro-batch; the first `skip` of them are left out, their results being of no use."""

    def __init__(self) -> None:
        self.made = self.skip = 0

    def attach(self, model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(_Gather(self))
                module.set_custom_reduce_scatter(_Scatter(self))

    def left_out(self, output: torch.Tensor) -> bool:
        if self.skip:
            self.skip -= 1
            output.zero_()
            return True
        self.made += 1
        return False


class _Comm:
    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Comm):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if self._exchanges.left_out(output_tensor):
            return None
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class _Scatter(_Comm):
    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        if self._exchanges.left_out(output_tensor):
            return None
        return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op)


class ShardedSteps:
    """The micro-batches of one rank of several."""

    def __init__(self, guard: Guard, model: Any) -> None:
        self._guard, self._model = guard, model
        self._ranks = DataParallelRanks()
        self._exchanges = Exchanges()
        self._exchanges.attach(model)

    def run(self, window: AccumulationWindow, inputs: Inputs, num_items: Any) -> torch.Tensor:
        pieces = self._guard.pieces
        if window.size is None:
            outcome = self._together(window, inputs, num_items, lambda: pieces.whole(self._model, inputs, num_items))
        else:
            outcome = self._in_pieces(window, inputs, num_items)
        while not isinstance(outcome, torch.Tensor):
            self._decide(window, num_items, outcome)
            outcome = self._repeat(window, num_items)
        return outcome

    def _together(
        self, window: AccumulationWindow, inputs: Inputs, num_items: Any, run: Callable[[], torch.Tensor]
    ) -> torch.Tensor | Failure | None:
        """One forward and backward of all ranks: its loss, this rank's failure, or None where another failed."""
        self._exchanges.made = 0
        outcome = self._guard.attempt(window, run)
        assert not isinstance(outcome, PeerFailed), "these ranks agree after the backward"
        if isinstance(outcome, torch.Tensor):
            return outcome if self._ranks.agree(RankVote()).well else None
        if outcome.lost is not None:
            self._guard.gives_up(outcome, outcome.lost)
        self._keep_company(inputs, num_items, outcome)
        self._ranks.agree(RankVote(well=False))
        return outcome

    def _keep_company(self, inputs: Inputs, num_items: Any, failure: Failure) -> None:
        """The exchanges that the others wait for, with one sample."""
        size = self._guard.pieces.size(inputs)
        self._model.reset_iter_state()
        next_settings.give_memory_back(self._guard.trainer.args.device)
        if size is None or split_batch.why_not(inputs, size) is not None:
            self._guard.gives_up(failure, "its batch cannot be cut, and the other ranks wait for its exchange of weights")
        self._exchanges.skip, self._exchanges.made = self._exchanges.made, 0
        try:
            self._guard.pieces.whole(self._model, split_batch.take(inputs, slice(0, 1), size or 1), num_items)
        except oom_errors.RAISED_AS as error:
            if oom_errors.recognise(error) is None:
                raise
            self._guard.gives_up(failure, "not even one sample fits, and the other ranks wait for its exchange of weights")

    def _decide(self, window: AccumulationWindow, num_items: Any, failure: Failure | None) -> None:
        """All ranks: whether the window can be cut, and the one size they go on with."""
        guard = self._guard
        self._drop()
        window.kept = guard.look(window, weights=True)
        inputs = window.batches[window.index]
        sizes = {guard.pieces.size(batch) for batch in window.batches[: window.index + 1]}
        size = guard.pieces.size(inputs)
        assert window.state is not None
        even = len(sizes) == 1 and size is not None and size > 1 and self._same_on_all(size)
        refused: Refusal | None = Refusal(name="uneven", reason="the ranks' batches differ in size")
        if even:
            refused = window.changed_in_place() or structural_refusal(self._model, guard.trainer) or guard.state.refusal(window.state)
            refused = self._not_a_sum(inputs, num_items, failure) or refused  # asked on all ranks, whatever the others found
        mine = RankVote(well=False)
        if failure is not None and refused is None:
            window.cleared.add(failure.seen.micro_batch)  # the others are not asked to run the same again
            mine = guard.own_word(window, self._model, num_items, failure)
        elif refused is not None:
            mine = RankVote(well=False, alive=False)
        word = self._ranks.agree(mine)
        if not word.alive or not word.without_checkpointing or word.size == rank_vote.WHOLE:
            guard.gives_up(failure, "another rank cannot go on" if refused is None else refused.reason)
        window.failed, window.size = True, word.size

    def _same_on_all(self, size: int | None) -> bool:
        smallest = self._ranks.agree(RankVote(size=size or 0)).size
        largest = -self._ranks.agree(RankVote(size=-(size or 0))).size
        return smallest == largest

    def _not_a_sum(self, inputs: Inputs, num_items: Any, failure: Failure | None) -> Refusal | None:
        pieces = self._guard.pieces
        if pieces.rule is None:
            found = pieces.find_rule(self._model, inputs, num_items, pieces.size(inputs) or 1)
            if isinstance(found, Refusal) and found.name in ("untried", "indivisible"):  # the others still wait in a forward
                self._guard.gives_up(failure, found.reason)
            if isinstance(found, Refusal):
                return found
            if found.name != "sum":
                return Refusal(name="mean", reason="under FSDP2 only a loss that divides by the window's items is run in pieces")
            pieces.rule = Rule(name="sum", settled=True)
        return None

    def _drop(self) -> None:
        self._model.reset_iter_state()
        self._model.zero_grad()
        next_settings.give_memory_back(self._guard.trainer.args.device)

    def _repeat(self, window: AccumulationWindow, num_items: Any) -> torch.Tensor | Failure | None:
        guard = self._guard
        assert window.rng is not None and window.state is not None
        self._drop()
        replay.restore(window.rng)
        guard.state.restore(window.state)
        guard.pieces.counters.restore(window.first_counters)
        outcome: torch.Tensor | Failure | None = None
        for place, inputs in enumerate(window.batches[: window.index + 1]):
            if place == window.index:
                guard.pieces.counters.restore(window.counters)
            guard.draw_from(window, place)
            guard.emit("micro_batch", window, place)
            outcome = self._in_pieces(window, inputs, num_items)
            if not isinstance(outcome, torch.Tensor):
                break
            if place < window.index and not guard.pieces.has_the_same_loss(inputs, window.losses[place], outcome, in_pieces=True):
                guard.gives_up(None, ANOTHER_LOSS)
        return outcome

    def _in_pieces(self, window: AccumulationWindow, inputs: Inputs, num_items: Any) -> torch.Tensor | Failure | None:
        """Each piece scatters its gradients, which keeps them small; the Trainer's own wish is put back."""
        pieces, size = self._guard.pieces, self._guard.pieces.size(inputs)
        assert size is not None and window.size is not None
        before, state = pieces.counters.snapshot(), replay.snapshot(self._guard.trainer.args.device)
        parts = split_batch.split(inputs, size, window.size)
        total: torch.Tensor | None = None
        self._model.set_requires_gradient_sync(True)
        try:
            for part in parts:
                run = _bound(pieces.whole, self._model, part, num_items)
                outcome = self._together(window, part, num_items, run)
                if not isinstance(outcome, torch.Tensor):
                    return outcome
                total = outcome if total is None else total + outcome
        finally:
            self._model.set_requires_gradient_sync(bool(self._guard.trainer.accelerator.sync_gradients))
        pieces.say_other_draws(state)
        if (why := pieces.counters.refusal(before)) is not None:
            self._guard.gives_up(None, why.reason)
        pieces.counters.merge_pieces(before, [1 / len(parts)] * len(parts))
        return total


def _bound(run: Callable[..., torch.Tensor], model: Any, part: Inputs, num_items: Any) -> Callable[[], torch.Tensor]:
    return lambda: run(model, split_batch.shallow_copy(part), num_items)
