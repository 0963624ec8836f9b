"""An OOM in evaluation shrinks the evaluation batch only: the same loss, predictions and labels, computed in pieces.

The smaller size is kept to the end: unlike training, nothing else waits for evaluation to grow back. The loss of a batch is a mean, over
labels or over samples; which one is found by trying it on two samples, as for training.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from hfopt.facts import loss_rule, oom_errors
from hfopt.facts.loss_rule import Rule
from hfopt.oom import kept_state, next_settings, replay, split_batch
from hfopt.oom.kept_state import Covered, Look
from hfopt.oom.own_counts import Snapshot
from hfopt.oom.step_down import Refusal, next_size
from hfopt.schema import OomSeen, ReplanStep


@dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    prediction_loss_only: bool
    ignore_keys: Any
    more: dict[str, Any]


class ProtectedEvaluation:
    """Stands around `prediction_step`."""

    def __init__(self, trainer: Any, guard: Any) -> None:
        self.trainer = trainer
        self.pieces, self.fit, self._guard = guard.pieces, guard.fit, guard
        self.size: int | None = None
        self._said = False
        self._original = trainer.prediction_step
        self._rule: Rule | Refusal | None = None

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **more: Any) -> Any:
        self.pieces.attach()
        options = _Options(prediction_loss_only=prediction_loss_only, ignore_keys=ignore_keys, more=more)
        size, before = self.pieces.size(inputs), self.pieces.counters.snapshot()
        drawn, kept, released = replay.snapshot(self.trainer.args.device), None, None
        while True:
            try:
                if self.size is None or size is None or size <= self.size:
                    return self._one(model, inputs, options)
                kept = kept or self._guard.kept.look(self._covered())
                found = self._in_pieces(model, inputs, size, options)
            except oom_errors.RAISED_AS as error:
                seen = self._seen(error, inputs, size)
                if seen is None:
                    raise
                released = oom_errors.without_frames(error)
            else:
                self._stays(kept, before, drawn, released)
                return found
            self.pieces.counters.restore(before)
            replay.restore(drawn)
            kept = self._guard.kept.look(self._covered())
            self._step_down(model, inputs, seen, options, released)

    def _covered(self) -> Covered:
        covered: Covered = self.pieces.counters.covered()
        return covered

    def _stays(self, kept: Look, counts: Snapshot, drawn: replay.RngState, released: BaseException | None) -> None:
        """What evaluation moves, it moves once per batch; a failed attempt and pieces have moved it otherwise."""
        what = self._guard.kept.moved(kept, self._covered())
        why = kept_state.refusal(what) if what is not None else self.pieces.counters.refusal(counts)
        if why is not None:
            text = f"evaluation cannot be run in pieces: {why.reason}"
            next_settings.say(f"hfopt: out of memory in {text}")
            raise released or torch.OutOfMemoryError(text)
        if not self._said and (replay.moved_in_torch(drawn) or replay.moved_on_the_host(drawn)):
            self._said = True
            next_settings.say("hfopt: evaluation draws random numbers; in pieces it draws others, and so does training after it")

    def _one(self, model: Any, inputs: Any, options: _Options) -> Any:
        return self._original(model, inputs, options.prediction_loss_only, ignore_keys=options.ignore_keys, **options.more)

    def _in_pieces(self, model: Any, inputs: Any, size: int, options: _Options) -> Any:
        from transformers.trainer_pt_utils import nested_concat

        assert self.size is not None
        before = self.pieces.counters.snapshot()
        parts = split_batch.split(inputs, size, self.size)
        sizes = [min(self.size, size - start) for start in range(0, size, self.size)]
        rule = self._rule.name if isinstance(self._rule, Rule) else "counted"
        shape = self.pieces.loss_shape(inputs)
        shares = loss_rule.weights(rule, parts, sizes, shape)
        results = []
        for part in parts:
            self.pieces.counters.restore(self.pieces.counters.each_call(before))
            results.append(self._one(model, part, options))
        self.pieces.counters.merge_pieces(before, loss_rule.weights("counted", parts, sizes, shape))
        losses = [result[0] * share for result, share in zip(results, shares, strict=True) if result[0] is not None and share]
        joined: list[Any] = [sum(losses[1:], losses[0]) if losses else None]
        for column in (1, 2):
            values = [result[column] for result in results]
            joined.append(None if any(value is None for value in values) else functools.reduce(nested_concat, values))
        return tuple(joined)

    def _seen(self, error: BaseException, inputs: Any, size: int | None) -> OomSeen | None:
        """None when it is no OOM or nothing is left to cut."""
        known = oom_errors.recognise(error)
        piece = min(self.size or size or 1, size or 1)
        if known is None or piece == 1 or split_batch.why_not(inputs, size) is not None:
            return None
        return next_settings.oom_seen(self.trainer, known, "evaluation", piece)

    def _step_down(self, model: Any, inputs: Any, seen: OomSeen, options: _Options, released: BaseException) -> None:
        next_settings.give_memory_back(self.trainer.args.device)
        self._find_rule(model, inputs, options)
        if isinstance(self._rule, Refusal):
            next_settings.say(f"hfopt: out of memory in evaluation, and it cannot be run in pieces: {self._rule.reason}")
            raise released
        self.size, reason = next_size(self.fit.candidate(seen.micro_batch), seen)
        step = ReplanStep(action="chunk", candidate=self.fit.candidate(self.size), reason=reason)
        next_settings.say(next_settings.replan_sentence(seen, step, self.fit.effective_batch))
        self.fit.log(next_settings.log_entry(seen, step, self.fit.effective_batch))

    def _find_rule(self, model: Any, inputs: Any, options: _Options) -> None:
        size = self.pieces.size(inputs)
        if size is None or size < 2 or (isinstance(self._rule, Rule) and self._rule.settled):
            return

        def loss_of(part: Any) -> float | None:
            loss = self._original(model, part, True, ignore_keys=options.ignore_keys, **options.more)[0]
            return None if loss is None else float(loss)

        before, drawn = self.pieces.counters.snapshot(), replay.snapshot(self.trainer.args.device)
        try:
            self._rule = self._tried(inputs, size, loss_of)
        except oom_errors.RAISED_AS as error:
            if oom_errors.recognise(error) is None:
                raise
            self._rule = Rule(name="counted", settled=False)  # two samples do not fit: what nearly every loss is
        self.pieces.counters.restore(before)
        replay.restore(drawn)

    def _tried(self, inputs: Any, size: int, loss_of: split_batch.LossOf) -> Rule | Refusal:
        if loss_of(split_batch.take(inputs, [0], size)) is None:  # prediction without labels: there is no loss to put together
            return Rule(name="samples", settled=True)
        return split_batch.find_rule(inputs, size, self.pieces.loss_shape(inputs), loss_of, (*loss_rule.MEANS, "sum"))


def protected(trainer: Any, guard: Any) -> Any:
    return ProtectedEvaluation(trainer, guard).prediction_step
