"""One micro-batch of a training step, whole or in pieces that add up to it exactly.

`accelerator.backward` is wrapped for good: it tells forward from backward when memory runs out, and multiplies a piece's loss by the
piece's weight, whatever `training_step` a subclass has. The pieces' losses, weighted, are summed for the Trainer's log.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Literal

import torch

from hfopt.compat.torch_patches import tf32_is_on
from hfopt.facts import loss_rule, oom_errors
from hfopt.facts.loss_rule import MEANS, LossShape, Rule, RuleName
from hfopt.oom import replay, split_batch
from hfopt.oom.kept_state import LIBRARIES
from hfopt.oom.next_settings import say
from hfopt.oom.own_counts import Counters, Snapshot
from hfopt.oom.replay import RngState
from hfopt.oom.split_batch import Inputs
from hfopt.oom.step_down import Refusal
from hfopt.oom.whole_draws import Draws, Learned, Rows

_EXCHANGES = {"gather", "gather_for_metrics", "reduce", "all_reduce", "all_gather", "all_gather_object", "broadcast"}
Step = Callable[..., torch.Tensor]
_VERIFIED = 3  # micro-batches in pieces whose losses are compared with that of the whole; after them at steps that lie twice as far
ANOTHER_LOSS = "a micro-batch that had gone through has another loss when it is run again, so something has moved since"
LastPiece = Callable[[], AbstractContextManager[None]]
# a head that fails on part of a batch (pairs in adjacent rows, a fixed batch in a buffer) raises one of these
CANNOT_TAKE_PART = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)


class CannotCut(Exception):  # noqa: N818 - a finding, not a fault
    """Found while pieces ran: they do not make up the whole. The window is run again otherwise."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Pieces:
    """Runs micro-batches through the Trainer's own `training_step`."""

    def __init__(self, trainer: Any, step: Step, before_backward: Callable[[torch.Tensor], None], last_piece: LastPiece) -> None:
        self.trainer = trainer
        self.counters = Counters(trainer)
        self.phase: Literal["forward", "backward"] = "forward"
        self.rule: Rule | None = None
        self.communicates = may_exchange(type(trainer))
        self._step = step
        self._before_backward = before_backward
        self._last_piece = last_piece
        self.after_first_piece: Callable[[], Refusal | None] = lambda: None
        self._verified = 0
        self.scale = 1.0  # of every loss; another one only after a restart, see `keep_scale`
        self._weight = 1.0
        self._backwards = 0
        self.looks_at_gradients = False  # whether a training_step changes them after its backward
        self._after_backward = 0.0
        self.accelerator: Any = None
        self.draws = Learned()  # how random numbers are drawn, from the check
        self.draws_alike = False  # numpy's and Python's numbers of a call do not depend on its samples
        self.noise_on_the_host = False  # they do, but each sample has its own: pieces draw others
        self._verify_at = 0  # the step at which losses are compared again
        self._said_draws = False
        self._own_step = type(trainer).training_step.__module__.split(".")[0] not in LIBRARIES

    def attach(self) -> None:
        """Wraps the accelerator's backward; again when the Trainer has made itself a new accelerator."""
        accelerator = self.trainer.accelerator
        if accelerator is self.accelerator:
            return
        self.accelerator = accelerator
        original = accelerator.backward

        def backward(loss: torch.Tensor, **more: Any) -> None:
            self._before_backward(loss)
            self.phase = "backward"
            self._backwards += 1
            weight = self._weight * self.scale
            original(loss if weight == 1.0 else loss * weight, **more)
            if self.looks_at_gradients:
                self._after_backward = gradient_norm(self.trainer.model)

        accelerator.backward = backward
        copied_without(accelerator, "backward")

    def whole(self, model: Any, inputs: Inputs, num_items: Any) -> torch.Tensor:
        self.phase, self._weight, self.looks_at_gradients = "forward", 1.0, False
        loss = self._step(model, inputs, num_items)
        return loss if self.scale == 1.0 else loss * self.scale

    def run(self, model: Any, inputs: Inputs, num_items: Any, piece: int | None, *, syncs: bool) -> torch.Tensor:
        """The loss of a micro-batch run in pieces of `piece` samples; its last piece synchronises gradients when `syncs`."""
        size = self.size(inputs)
        inputs = split_batch.shallow_copy(inputs)
        if size is None or piece is None or piece >= size:
            with self._last_piece() if syncs else self.accelerator.no_sync(model):
                return self.whole(model, inputs, num_items)
        before = self.counters.snapshot()
        parts, shares, tokens, rows = self._cut(model, inputs, num_items, size, piece)
        state = replay.snapshot(self.trainer.args.device)
        total: torch.Tensor | None = None
        each_call = self.counters.each_call(before)
        self.looks_at_gradients = self._own_step
        ends: list[tuple[torch.Tensor, ...]] = []
        for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
            last = syncs and number == len(parts) - 1
            if number:
                self.counters.restore(each_call)
                replay.restore_host(state)
            with self._last_piece() if last else self.accelerator.no_sync(model), self._drawing(state, rows[number]):
                loss = self.one(model, part, num_items, share)
            if self.draws.givable:
                self._draws_the_same(ends)
            total = loss if total is None else total + loss
            if number == 0 and len(parts) > 1 and (why := self.after_first_piece() or self._moved(before, state)) is not None:
                raise CannotCut(why)
        if (why := self._moved(before, state)) is not None:
            raise CannotCut(why)
        self.say_other_draws(state)
        self.counters.merge_pieces(before, tokens)
        assert total is not None
        return total

    def _moved(self, before: Snapshot, state: RngState) -> Refusal | None:
        if not (self.draws_alike or self.noise_on_the_host) and replay.moved_on_the_host(state):
            return drawn_on_the_host()
        return self.counters.refusal(before)

    def has_the_same_loss(self, inputs: Inputs, before: torch.Tensor, now: torch.Tensor, *, in_pieces: bool) -> bool:
        """Of a micro-batch that had gone through, run again: what its loss depends on may have moved since."""
        if before.numel() != 1 or (in_pieces and (self.noise_on_the_host or self._said_draws)):
            return True
        one, other = float(before), float(now)
        apart = abs(one - other) > self.loss_shape(inputs).tolerance * max(abs(one), abs(other))
        return not (apart and math.isfinite(one) and math.isfinite(other))

    def _drawing(self, state: RngState, rows: Rows) -> AbstractContextManager[Any]:
        """Every piece draws as the whole would have, where it can be given that."""
        if not self.draws.givable:
            return nullcontext()
        replay.restore_torch(state)
        return Draws(self.draws, rows)

    def _draws_the_same(self, ends: list[tuple[torch.Tensor, ...]]) -> None:
        """Every piece draws for the whole, so each leaves the generators in one place, unless what is drawn depends on the samples."""
        ends.append(replay.of_torch(self.trainer.args.device))
        if not replay.alike(ends[0], ends[-1]):
            self.draws.other = "as many numbers as its samples ask for"

    def say_other_draws(self, before: RngState) -> None:
        others = replay.moved_in_torch(before) and not self.draws.givable
        if not self._said_draws and (others or (replay.moved_on_the_host(before) and not self.draws_alike)):
            self._said_draws = True
            say("hfopt: dropout draws other masks for the pieces than for the whole micro-batch")

    def one(self, model: Any, part: Inputs, num_items: Any, share: float) -> torch.Tensor:
        self.phase, self._weight, self._backwards = "forward", share, 0
        try:
            loss = self._step(model, part, num_items) * (share * self.scale)
        finally:
            self._weight = 1.0
        if self._backwards != 1:
            raise CannotCut(_not_one_backward(self._backwards))
        after = self._after_backward if self.looks_at_gradients else math.nan
        if math.isfinite(after) and gradient_norm(self.trainer.model) != after:
            reason = "training_step changes the gradients after each micro-batch"
            raise CannotCut(Refusal(name="gradients_touched", reason=reason, batch_bound=True))
        return loss

    def _cut(
        self, model: Any, inputs: Inputs, num_items: Any, size: int, piece: int
    ) -> tuple[list[Inputs], list[float], list[float], list[Rows]]:
        """The pieces that count, their weights in the loss, their shares of the labels, and where they stand."""
        if self.rule is None or not self.rule.settled:
            found = self.find_rule(model, inputs, num_items, size)
            if isinstance(found, Refusal):
                raise CannotCut(found)
        assert self.rule is not None
        parts = split_batch.split(inputs, size, piece)
        sizes = [min(piece, size - start) for start in range(0, size, piece)]
        shape = self.loss_shape(inputs)
        shares = loss_rule.weights(self.rule.name, parts, sizes, shape)
        tokens = loss_rule.weights("counted", parts, sizes, shape)
        if self._verified < _VERIFIED or self.trainer.state.global_step >= self._verify_at or not self.rule.settled:
            self._verify(model, inputs, num_items, parts, shares, shape.tolerance)
        counting = [number for number, share in enumerate(shares) if share > 0]
        rows = [Rows(start=n * piece, count=sizes[n], of=size) for n in counting]
        return [parts[n] for n in counting], [shares[n] for n in counting], [tokens[n] for n in counting], rows

    def _verify(self, model: Any, inputs: Inputs, num_items: Any, parts: list[Inputs], shares: list[float], tolerance: float) -> None:
        """Two samples can be alike by chance (one class, where classes are weighted): the losses of all pieces are compared with the whole
        one's. Where that does not fit even without gradients, the two samples' word stands."""
        bare = self.accelerator.unwrap_model(model)
        loss_of = self.loss_of(bare, num_items)
        try:
            with self._without_a_trace(bare):
                whole = loss_of(inputs)
                losses = [loss_of(part) if share else 0.0 for part, share in zip(parts, shares, strict=True)]
        except CANNOT_TAKE_PART as error:
            if oom_errors.recognise(error) is None:
                raise CannotCut(indivisible(error)) from None
            return
        values = [loss for loss in losses if loss is not None]
        if whole is None or len(values) < len(losses):
            return
        summed = sum(share * loss for share, loss in zip(shares, values, strict=True))
        if abs(summed - whole) > tolerance * max(abs(whole), *map(abs, values)):
            reason = "the losses of its pieces, weighted by their labels or samples, do not make up the loss of the micro-batch"
            raise CannotCut(Refusal(name="contrastive", reason=reason, batch_bound=True))
        self._verified += 1
        self._verify_at = self.twice_as_late()

    def twice_as_late(self) -> int:
        """A term may grow from nothing (warmed up, or the distance from a reference model): it is looked for again, ever more rarely."""
        step = int(self.trainer.state.global_step)
        return max(step + 1, 2 * step)

    def size(self, inputs: Inputs) -> int | None:
        return split_batch.batch_size(inputs, getattr(self.trainer.model, "main_input_name", None))

    def refusal(self, model: Any, inputs: Inputs, num_items: Any) -> Refusal | None:
        """Why this micro-batch cannot be run in pieces; settles the rule on the way."""
        size = self.size(inputs)
        bare = self.accelerator.unwrap_model(model)
        refused = split_batch.structural_refusal(bare, self.trainer) or split_batch.why_not(inputs, size)
        if refused is not None or size is None or size == 1 or (self.rule is not None and self.rule.settled):
            return refused
        found = self.find_rule(model, inputs, num_items, size)
        return found if isinstance(found, Refusal) else None

    def find_rule(self, model: Any, inputs: Inputs, num_items: Any, size: int) -> Rule | Refusal:
        bare = self.accelerator.unwrap_model(model)
        try:
            with self._without_a_trace(bare):
                found = split_batch.find_rule(
                    inputs, size, self.loss_shape(inputs), self.loss_of(bare, num_items), self._expected(num_items)
                )
        except torch.OutOfMemoryError:
            found = Refusal(name="untried", reason="not even two samples fit without gradients")
        except CANNOT_TAKE_PART as error:
            found = indivisible(error)
        if isinstance(found, Rule):
            self.rule = found
        return found

    def keep_scale(self, model: Any, inputs: Inputs, num_items: Any, accumulation: int) -> None:
        """A restart has changed the accumulation; gradients and logged loss stay as with the script's own.

        Only a head that ignores the number of items makes a difference; whether it does is tried.
        """
        if num_items is None or self._expected(num_items)[0] != "sum":
            return
        bare = self.accelerator.unwrap_model(model)
        with self._without_a_trace(bare):
            once, twice = (self.loss_of(bare, items)(inputs) for items in (num_items, 2 * num_items))
        if once and twice is not None and not loss_rule.uses_items(once, twice):
            self.scale = accumulation / self.trainer.args.gradient_accumulation_steps

    @contextmanager
    def _without_a_trace(self, bare: Any) -> Iterator[None]:
        """Losses that are only looked at: no gradient, and counters and random numbers as they were."""
        before, state = self.counters.snapshot(), replay.snapshot(self.trainer.args.device)
        try:
            with loss_rule.evaluating(bare):
                yield
        finally:
            self.counters.restore(before)
            replay.restore(state)

    def loss_of(self, bare: Any, num_items: Any) -> split_batch.LossOf:
        def loss_of(inputs: Inputs) -> float | None:
            prepared = self.trainer._prepare_inputs(split_batch.shallow_copy(inputs))
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(bare, prepared, num_items_in_batch=num_items)
            return float(loss) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None

        return loss_of

    def _expected(self, num_items: Any) -> tuple[RuleName, ...]:
        """In the order of likelihood, for when two samples do not tell: is the loss divided by the window's items already?"""
        scaled = loss_rule.left_to_the_loss(self.trainer, counts_items=num_items is not None)
        return ("sum", *MEANS) if scaled else (*MEANS, "sum")

    def loss_shape(self, inputs: Inputs) -> LossShape:
        trainer = self.trainer
        names = ("shift_labels", "labels", *(trainer.label_names or ()))
        label = next((name for name in names if inputs.get(name) is not None), None)
        return LossShape(
            label_name=label, shifted=label != "shift_labels" and _shifts_labels(trainer), tolerance=_tolerance(trainer, self.accelerator)
        )


def copied_without(thing: Any, *wrapped: str) -> None:
    """Copies and pickles of it are as it was: what is wrapped leads to the original, so a copy would train that one."""
    if getattr(type(thing), "__getstate__", None) is not getattr(object, "__getstate__", None):  # object has one from Python 3.11 on
        return  # it says itself what is copied of it
    dropped = {*wrapped, "__getstate__"}
    thing.__getstate__ = lambda: {name: value for name, value in vars(thing).items() if name not in dropped}


def _not_one_backward(count: int) -> Refusal:
    times = "never" if count == 0 else f"{count} times"
    return Refusal(name="own_backward", reason=f"training_step runs accelerator.backward {times} per micro-batch", batch_bound=True)


def indivisible(error: BaseException) -> Refusal:
    text = str(error).partition("\n")[0]
    return Refusal(name="indivisible", reason=f"the loss cannot be computed for a part of the batch: {text}", batch_bound=True)


def drawn_on_the_host() -> Refusal:
    reason = "numpy's or Python's random numbers are drawn in the step, and pieces cannot be given the whole's"
    return Refusal(name="drawn_on_the_host", reason=reason, batch_bound=True)


def gradient_norm(model: torch.nn.Module) -> float:
    norms = [parameter.grad.norm().float() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack([norm.cpu() for norm in norms]).norm()) if norms else 0.0


def may_exchange(kind: type) -> bool:
    """A subclass whose own methods call a collective, as TRL's do to log over all ranks. Read from the methods' code, before any step."""
    from transformers import Seq2SeqTrainer, Trainer

    own = [base for base in kind.__mro__ if issubclass(base, Trainer) and base not in (Trainer, Seq2SeqTrainer)]
    functions = [getattr(value, "__wrapped__", value) for base in own for value in vars(base).values()]
    return any(_EXCHANGES & set(function.__code__.co_names) for function in functions if isinstance(function, FunctionType))


def _shifts_labels(trainer: Any) -> bool:
    known = getattr(trainer, "_loss_shifts_labels", None)
    if known is not None:
        return bool(known)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(trainer.accelerator.unwrap_model(trainer.model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _tolerance(trainer: Any, accelerator: Any) -> float:
    """How far equal losses may lie apart: the rounding of matrix products that are split differently."""
    dtypes = {parameter.dtype for parameter in trainer.model.parameters()}
    if accelerator.mixed_precision in ("fp16", "bf16", "fp8") or dtypes & {torch.float16, torch.bfloat16}:
        return 2e-2
    if trainer.args.device.type == "cuda" and tf32_is_on():
        return 2e-3
    return 2e-6 if dtypes == {torch.float64} else 2e-5  # transformers takes the loss of float64 logits in float32
