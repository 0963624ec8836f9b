"""What stands around a Trainer's steps: keeps the window, repeats it when memory ran out, and decides how long smaller pieces last.

The Trainer fetches all micro-batches of an optimizer step before it runs the first (`get_batch_samples`), and runs each with
`training_step`. Both are wrapped on the trainer object. When a micro-batch fails, the error is let go (its traceback holds the tensors),
the gradients are dropped, memory is cleared, the random generators are set back to the window's start, and the window is run again from its
first micro-batch in pieces with the same `num_items_in_batch`. Nothing outside the step notices: the Trainer's counters are changed only
after `training_step` returns.

Limits: random numbers that pieces cannot be given (`whole_draws.py`) are others than the whole's. What the script itself keeps between
calls (`kept_state.py`) cannot be put back. A process that cannot repeat its step (such state moved, the optimizer had begun, FSDP1, ZeRO,
an exchange of gradients had begun) says so and ends; `hfopt run` restarts it from its last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

import torch

from hfopt.facts import oom_errors
from hfopt.oom import kept_state, next_settings, rank_vote, replay, split_batch
from hfopt.oom.kept_state import Covered, KeptState, Look
from hfopt.oom.left_behind import AsFound
from hfopt.oom.micro_batch import ANOTHER_LOSS, CannotCut, Pieces, gradient_norm
from hfopt.oom.next_settings import Fit, Settings, Sink, Supervisor
from hfopt.oom.rank_vote import DataParallelRanks, PeerFailed, RankVote, ShardedSteps, can_be_repeated
from hfopt.oom.replay import AccumulationWindow, ForwardState
from hfopt.oom.split_batch import structural_refusal
from hfopt.oom.step_down import Pace, Refusal, after_window
from hfopt.oom.two_samples import TwoSamples
from hfopt.schema import FallbackEvent, MemoryModel, OomSeen

EventKind = Literal["micro_batch", "oom", "decision", "window"]
MOST_ATTEMPTS = 16  # per window: a batch of 4096 halves 12 times, and clearing and checkpointing come on top


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An OOM after its traceback was let go. `error` is raised again, with the traceback's text, when nothing helps."""

    error: BaseException
    seen: OomSeen
    lost: str | None = None  # why this process cannot repeat the step


class Guard:
    def __init__(
        self, trainer: Any, *, memory: MemoryModel | None, log: Sink | None, settings: Settings | None, settle_after: int, grow_after: int
    ) -> None:
        self.trainer = trainer
        self.refusal: Refusal | None = None
        self.pieces = Pieces(trainer, trainer.training_step, self._before_backward, self._last_piece)
        self._two_samples = TwoSamples(self.pieces)
        self.kept = KeptState(trainer, trainer.training_step)
        self.fit = Fit(trainer, memory=memory, log=log, settings=settings)
        self._device: torch.device = trainer.args.device  # a property that looks at the installed packages each time
        self._get_batch_samples = trainer.get_batch_samples
        self._pace = Pace(full=trainer.args.train_batch_size, settle_after=settle_after, grow_after=grow_after)
        self._window: AccumulationWindow | None = None
        self._ranks: DataParallelRanks | None = None
        self._sharded: ShardedSteps | None = None
        self.state = ForwardState(trainer)
        self._as_found = AsFound(trainer)
        self._uncut: Refusal | None = None  # found while pieces ran; holds for the rest of the run
        self._last: Failure | None = None
        self._told = False  # the supervisor knows why this process ends
        self._listeners: list[Callable[[FallbackEvent], None]] = []
        self.scripts_accumulation: int | None = None  # set by a restart that has changed it; None once it is seen to

    def settings_changed(self) -> None:
        """The Trainer was given another batch size after it was made."""
        self._pace = replace(self._pace, full=self.trainer.args.train_batch_size)

    def use_memory(self, memory: MemoryModel | None) -> None:
        """Sizes are chosen by this curve from now on."""
        self.fit.memory = memory

    def supervised_by(self, supervisor: Supervisor) -> None:
        """What this process cannot survive, and settings that went through, are passed on to whoever can start it again."""
        self.fit.supervisor = supervisor

    def listen(self, listener: Callable[[FallbackEvent], None]) -> None:
        """Calls `listener` with each event, in the training thread; what it raises comes out of the step."""
        self._listeners.append(listener)

    def emit(self, kind: EventKind, window: AccumulationWindow, micro_batch: int | None = None, **more: Any) -> None:
        if not self._listeners:
            return
        place = window.index if micro_batch is None else micro_batch
        step = self.trainer.state.global_step
        event = FallbackEvent(kind=kind, step=step, micro_batch=place, attempt=window.attempts, piece=window.size, **more)
        for listener in self._listeners:
            listener(event)

    # ------------------------------------------------------------------------------------------ the two wrapped methods

    def get_batch_samples(self, *args: Any, **more: Any) -> Any:
        self.pieces.attach()
        if self._sharded is None and self.trainer.args.world_size > 1 and can_be_repeated(self.trainer.model_wrapped):
            self._sharded = ShardedSteps(self, self.trainer.model_wrapped)
        if self._sharded is None and self._ranks is None and self.trainer.args.world_size > 1 and torch.distributed.is_initialized():
            self._ranks = DataParallelRanks()
        batches, num_items = self._get_batch_samples(*args, **more)
        self._window = AccumulationWindow.of(batches, self._pace.size)
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        window = self._window
        if window is None or window.done:  # called by hand, outside the Trainer's loop
            return self.pieces.whole(model, inputs, num_items_in_batch)
        self._begin(window, model)
        if self.scripts_accumulation is not None:
            self.pieces.keep_scale(model, split_batch.shallow_copy(inputs), num_items_in_batch, self.scripts_accumulation)
            self.scripts_accumulation = None
        if self._sharded is not None:
            self.emit("micro_batch", window)
            loss = self._sharded.run(window, inputs, num_items_in_batch)
            if (why := self._moved(window)) is not None:
                self.gives_up(self._last, why.reason)
            return self._end(window, loss)
        outcome = self.attempt(window, lambda: self._first_run(window, model, inputs, num_items_in_batch))
        while not isinstance(outcome, torch.Tensor):
            self._decide(window, model, num_items_in_batch, outcome)
            outcome = self.attempt(window, lambda: self._replay(window, model, num_items_in_batch))
        return self._end(window, outcome)

    def _first_run(self, window: AccumulationWindow, model: Any, inputs: Any, num_items: Any) -> torch.Tensor:
        self.emit("micro_batch", window)
        if window.size is not None:
            window.kept = self.look(window)
            loss = self.pieces.run(model, inputs, num_items, window.size, syncs=self._syncs(window))
            self._stays(window)
            return loss
        with self._last_piece():
            return self.pieces.whole(model, inputs, num_items)

    def attempt(self, window: AccumulationWindow, run: Callable[[], torch.Tensor]) -> torch.Tensor | Failure | PeerFailed:
        """The loss, or why there is none; an error that is not about memory comes out as it is."""
        try:
            return run()
        except PeerFailed as error:
            return error.with_traceback(None)
        except CannotCut as error:
            self._uncut = self._moved(window) or error.refusal
            last = self._last or self._failure(torch.OutOfMemoryError("another rank ran out of memory"), window)
            assert last is not None, "it is an out-of-memory error"
            if self._ranks is not None and self._ranks.exchanging:
                last = replace(last, lost=self._uncut.reason)
            return replace(last, seen=replace(last.seen, micro_batch=self.pieces.size(window.batches[window.index]) or 1))
        except oom_errors.RAISED_AS as error:
            found = self._failure(error, window)
            if found is None:
                raise
            return found

    def _begin(self, window: AccumulationWindow, model: Any) -> None:
        if window.index == 0:
            window.rng = replay.snapshot(self._device)
            window.state, window.step = self.state.note(), self.trainer.state.global_step
            window.found = self._as_found.note()
            self.pieces.after_first_piece = lambda: self._moved(window) or self.state.refusal(window.noted)
        elif self._acts_between():
            window.rngs[window.index] = replay.snapshot(self._device)
            window.touched = window.touched or repr(gradient_norm(self.trainer.model)) != repr(window.norm)
        window.counters = self.pieces.counters.snapshot()
        if window.index == 0:
            window.first_counters = window.counters
        if self._ranks is not None:
            self._ranks.begin(model, window_begins=window.index == 0)

    def _acts_between(self) -> bool:
        """Whether a callback of the script runs between micro-batches: it may draw random numbers, and touch gradients."""
        kinds = [type(one) for one in self.trainer.callback_handler.callbacks]
        return any(kept_state.is_own(getattr(kind, "on_substep_end", None)) for kind in kinds)

    def _end(self, window: AccumulationWindow, loss: torch.Tensor) -> torch.Tensor:
        window.index += 1
        window.kept = None
        window.losses.append(loss.detach())
        if not window.done and self._acts_between():
            window.norm = gradient_norm(self.trainer.model)
        if window.done:
            self.emit("window", window)
            self.state.through(window.noted)
            self._pace = after_window(self._pace, window.size if window.failed else None)
        return loss

    def _syncs(self, window: AccumulationWindow) -> bool:
        return self._ranks.syncs if self._ranks is not None else window.last

    def _last_piece(self) -> AbstractContextManager[None]:
        return self._ranks.held() if self._ranks is not None else nullcontext()

    def _before_backward(self, loss: torch.Tensor) -> None:
        """The point of agreement: the last moment at which all ranks can still turn back."""
        ranks, window = self._ranks, self._window
        if ranks is None or window is None or not ranks.holding:
            return
        word = ranks.agree(RankVote(size=window.size if window.failed and window.size is not None else rank_vote.WHOLE))
        if not word.well:
            raise PeerFailed(word)
        ranks.exchange(loss)
        if word.size != rank_vote.WHOLE:  # another rank had to go down in an earlier micro-batch: all remember the same
            window.size, window.failed = word.size, True

    # ------------------------------------------------------------------------------------------ recovery

    def look(self, window: AccumulationWindow, *, weights: bool = False) -> Look:
        """At what the script's own code keeps and nothing here puts back."""
        return self.kept.look(self._covered(window), weights=weights)

    def _covered(self, window: AccumulationWindow) -> Covered:
        return self.pieces.counters.covered() | self.state.covered(window.noted)

    def _moved(self, window: AccumulationWindow) -> Refusal | None:
        if window.kept is None:
            return None
        what = self.kept.moved(window.kept, self._covered(window))
        return None if what is None else kept_state.refusal(what)

    def _stays(self, window: AccumulationWindow) -> None:
        if (why := self._moved(window)) is not None:
            raise CannotCut(why)

    def _replay(self, window: AccumulationWindow, model: Any, num_items: Any) -> torch.Tensor:
        """The window once more, up to the micro-batch that failed. Losses of the earlier ones were already returned."""
        if window.size is not None:
            self._two_samples.check(model, window.batches[0], num_items)
            self._stays(window)
        model.zero_grad()
        assert window.rng is not None
        replay.restore(window.rng)
        self.state.restore(window.noted)
        self.pieces.counters.restore(window.first_counters)  # a loss may look at what its Trainer has counted
        for place, inputs in enumerate(window.batches[: window.index]):
            self.draw_from(window, place)
            self.emit("micro_batch", window, place)
            loss = self.pieces.run(model, inputs, num_items, window.size, syncs=False)
            if not self.pieces.has_the_same_loss(inputs, window.losses[place], loss, in_pieces=window.size is not None):
                raise CannotCut(Refusal(name="state_in_step", reason=ANOTHER_LOSS, batch_bound=True, lasting=True))
        self.pieces.counters.restore(window.counters)
        self.draw_from(window, window.index)
        self.emit("micro_batch", window)
        loss = self.pieces.run(model, window.batches[window.index], num_items, window.size, syncs=self._syncs(window))
        self._stays(window)
        return loss

    @staticmethod
    def draw_from(window: AccumulationWindow, place: int) -> None:
        if place in window.rngs:
            replay.restore(window.rngs[place])

    def _failure(self, error: BaseException, window: AccumulationWindow) -> Failure | None:
        """Reads what can be read while the failed step is still alive, then lets go of it."""
        known = oom_errors.recognise(error)
        if known is None:
            return None
        inputs = window.batches[window.index]
        size = self.pieces.size(inputs)
        seen = next_settings.oom_seen(self.trainer, known, self.pieces.phase, min(window.size or size or 1, size or 1), inputs)
        lost = None if known.recoverable else "a collective ran out of memory"
        if window.state is not None and window.state.begun:
            lost = "the model had gradients before the step began, and they are gone"
        elif window.touched:
            lost = "a callback changes the gradients between micro-batches, and a repeated step would be without that"
        if self._ranks is not None and self._ranks.exchanging:
            lost = "gradients were being exchanged, so the ranks are out of step"
        elif (self._ranks or self._sharded) is not None and self.pieces.communicates:
            lost = "the loss exchanges values with the other ranks, which cannot be repeated on one of them"
        lost = lost or self._process_lost() or (self._as_found.left(window.found) if self._sharded is None else None)
        return Failure(error=oom_errors.without_frames(error), seen=seen, lost=lost)

    def _decide(self, window: AccumulationWindow, model: Any, num_items: Any, failure: Failure | PeerFailed) -> None:
        """Clears memory and goes one step down; raises when there is none left."""
        torch.set_grad_enabled(True)  # a script that had switched it off was cut off before it could switch it on
        model.zero_grad()
        next_settings.give_memory_back(self._device)
        window.kept = self.look(window, weights=True)
        if isinstance(failure, PeerFailed):
            word = failure.word
        else:
            self._last = failure
            self.emit("oom", window, seen=failure.seen)
            word = self.own_word(window, model, num_items, failure)
            if self._ranks is not None and self._ranks.syncs and failure.lost is None:
                self._ranks.join_forward()
                word = self._ranks.agree(word)
        if self._ranks is not None:
            self._ranks.settle()
        if not word.alive:
            raise failure.error if isinstance(failure, Failure) else failure
        if not word.without_checkpointing:
            self.fit.enable_checkpointing()
            window.found = self._as_found.note()
        window.failed = True
        window.size = word.size if word.size != rank_vote.WHOLE else None if self._uncut is not None else window.size

    def own_word(self, window: AccumulationWindow, model: Any, num_items: Any, failure: Failure) -> RankVote:
        inputs = window.batches[window.index]
        if self._uncut is not None:
            self.refusal = self._uncut
        elif self._process_lost() is None:
            written = window.changed_in_place() or structural_refusal(self.trainer.model, self.trainer)
            self.refusal = written or self.state.refusal(window.noted) or self.pieces.refusal(model, inputs, num_items)
        else:  # the model runs only on all ranks together, so its loss cannot be asked
            self.refusal = window.changed_in_place() or structural_refusal(model, self.trainer)
        if self.refusal is not None:  # what moved is the better reason, and then nothing is repeated
            self.refusal = self._moved(window) or self.refusal
        window.attempts += 1
        piece = failure.seen.micro_batch
        lost = failure.lost or ("sixteen attempts failed" if window.attempts > MOST_ATTEMPTS else None)
        if self.refusal is not None and self.refusal.lasting and lost is None:
            lost = self.refusal.reason
            next_settings.say(f"hfopt: the step is not repeated in this process, for {lost}")
        step = self.fit.step_down(failure.seen, refusal=self.refusal, lost=lost, cleared=piece in window.cleared)
        self.emit("decision", window, decision=step)
        if step.action == "retry_after_clearing":
            window.cleared.add(piece)
        if step.action in ("restart", "give_up"):
            self._told = True
            return RankVote(well=False, alive=False)
        assert step.candidate is not None
        size = step.candidate.per_device_batch
        return RankVote(
            well=False,
            size=size if size < (self.pieces.size(inputs) or 1) else rank_vote.WHOLE,
            without_checkpointing=step.action != "checkpointing",
        )

    def _process_lost(self) -> str | None:
        return None if self._sharded is not None else self.fit.process_lost()

    def gives_up(self, failure: Failure | None, why: str) -> NoReturn:
        """A step of several ranks that cannot be repeated: the one that failed says so, and all end."""
        next_settings.say(f"hfopt: the step cannot be repeated in this process: {why}")
        if failure is None:
            raise PeerFailed(RankVote(well=False, alive=False))
        self.fit.step_down(failure.seen, refusal=None, lost=why, cleared=True)
        self._told = True
        raise failure.error

    def on_escape(self, error: BaseException) -> None:
        """An OOM that no step could hold: says where it was and leaves the rest to the supervisor."""
        known = oom_errors.recognise(error)
        if known is None or self._told:
            return
        self._told = True
        window = self._window
        after_backward = window is not None and window.done and window.step == self.trainer.state.global_step
        seen = next_settings.oom_seen(self.trainer, known, "optimizer" if after_backward else "unknown", self._pace.size or self._pace.full)
        why = "the optimizer step had begun, so part of the weights may have moved" if after_backward else "memory ran out between steps"
        self.fit.step_down(seen, refusal=None, lost=why, cleared=True)
