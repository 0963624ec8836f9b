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

from hfopt.compat import tf32_is_on
from hfopt.facts import loss_rule, oom_errors
from hfopt.facts.loss_rule import MEANS, LossShape, Rule, RuleName
from hfopt.oom import replay, split_batch
from hfopt.oom.next_settings import give_memory_back, say
from hfopt.oom.replay import Counters, RngState
from hfopt.oom.split_batch import Inputs
from hfopt.oom.step_down import Refusal
from hfopt.oom.whole_draws import Draws, Learned, Rows

_EXCHANGES = {"gather", "gather_for_metrics", "reduce", "all_reduce", "all_gather", "all_gather_object", "broadcast"}
Step = Callable[..., torch.Tensor]
_VERIFIED = 3  # micro-batches in pieces whose losses are compared with that of the whole; after them at steps that lie twice as far
_GRADIENTS = 10  # times the tolerance of a loss: gradients are sums over more products
LastPiece = Callable[[], AbstractContextManager[None]]
# a head that fails on part of a batch (pairs in adjacent rows, a fixed batch in a buffer) raises one of these
_CANNOT_TAKE_PART = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)


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
        self._accelerator: Any = None
        self.draws = Learned()  # how random numbers are drawn, from the check
        self._check_at = self._verify_at = 0  # the steps at which gradients and losses are compared again
        self._said_draws = self._said_unchecked = False

    def attach(self) -> None:
        """Wraps the accelerator's backward; again when the Trainer has made itself a new accelerator."""
        accelerator = self.trainer.accelerator
        if accelerator is self._accelerator:
            return
        self._accelerator = accelerator
        original = accelerator.backward

        def backward(loss: torch.Tensor, **more: Any) -> None:
            self._before_backward(loss)
            self.phase = "backward"
            self._backwards += 1
            weight = self._weight * self.scale
            original(loss if weight == 1.0 else loss * weight, **more)

        accelerator.backward = backward

    def whole(self, model: Any, inputs: Inputs, num_items: Any) -> torch.Tensor:
        self.phase, self._weight = "forward", 1.0
        loss = self._step(model, inputs, num_items)
        return loss if self.scale == 1.0 else loss * self.scale

    def run(self, model: Any, inputs: Inputs, num_items: Any, piece: int | None, *, syncs: bool) -> torch.Tensor:
        """The loss of a micro-batch run in pieces of `piece` samples; its last piece synchronises gradients when `syncs`."""
        size = self.size(inputs)
        inputs = split_batch.shallow_copy(inputs)
        if size is None or piece is None or piece >= size:
            with self._last_piece() if syncs else self._accelerator.no_sync(model):
                return self.whole(model, inputs, num_items)
        before = self.counters.snapshot()
        parts, shares, tokens, rows = self._cut(model, inputs, num_items, size, piece)
        state = replay.snapshot(self.trainer.args.device)
        total: torch.Tensor | None = None
        for number, (part, share) in enumerate(zip(parts, shares, strict=True)):
            last = syncs and number == len(parts) - 1
            with self._last_piece() if last else self._accelerator.no_sync(model), self._drawing(state, rows[number]):
                loss = self._one(model, part, num_items, share)
            total = loss if total is None else total + loss
            if number == 0 and len(parts) > 1 and (why := self.after_first_piece()) is not None:
                raise CannotCut(why)
        self.say_other_draws(state)
        self.counters.merge_pieces(before, tokens)
        assert total is not None
        return total

    def _drawing(self, state: RngState, rows: Rows) -> AbstractContextManager[Any]:
        """Every piece draws as the whole would have, where it can be given that."""
        if not self.draws.givable:
            return nullcontext()
        replay.restore_torch(state)
        return Draws(self.draws, rows)

    def say_other_draws(self, before: RngState) -> None:
        if not (self._said_draws or self.draws.givable) and replay.moved(before):
            self._said_draws = True
            say("hfopt: dropout draws other masks for the pieces than for the whole micro-batch")

    def check(self, model: Any, inputs: Inputs, num_items: Any) -> None:
        """Before pieces are trusted, and where no gradient is waiting: the gradient of two samples is that of each, added up.

        Losses alone do not show a term that only training mode has, one that is added in backward, samples that are mixed with each
        other, or hooks that change gradients. The random numbers are the same for both, as far as they can be given; where they cannot,
        the losses' word stands. What was moved is put back by who calls.
        """
        size = self.size(inputs)
        if self.trainer.state.global_step < self._check_at or size is None or size < 2:
            return
        if self.rule is None and isinstance(found := self.find_rule(model, inputs, num_items, size), Refusal):
            raise CannotCut(found)
        assert self.rule is not None
        shape = self.loss_shape(inputs)
        pair = split_batch.two_unlike_samples(inputs, size, shape)
        alone = [split_batch.take(inputs, [row], size) for row in pair]
        shares = loss_rule.weights(self.rule.name, alone, [1, 1], shape)
        if 0.0 in shares:
            return
        self._check_at = self._twice_as_late()
        bare = self._accelerator.unwrap_model(model)
        state = replay.snapshot(self.trainer.args.device)
        self.draws = Learned()
        norms = []
        try:
            with Draws(self.draws, None):
                self._one(bare, split_batch.take(inputs, pair, size), num_items, 1.0)
            norms.append(_gradient_norm(bare))
            for place, (one, share) in enumerate(zip(alone, shares, strict=True)):
                replay.restore_torch(state)
                with Draws(self.draws, Rows(start=place, count=1, of=2), learns=True):
                    self._one(bare, one, num_items, -share)
                norms.append(_gradient_norm(bare))
        except oom_errors.RAISED_AS as error:
            if oom_errors.recognise(error) is None:
                raise
            self._check_losses(bare, inputs, num_items, pair, shares)
            return
        if self.draws.permutes:
            raise CannotCut(_mixed(f"the model draws a permutation ({self.draws.other})"))
        comparable = self.draws.other is None and all(map(math.isfinite, norms)) and not replay.moved_on_the_host(state)
        if comparable and norms[2] > _GRADIENTS * shape.tolerance * max(norms):
            raise CannotCut(_mixed("the gradient of two samples is not that of each alone, though their losses add up"))

    def _check_losses(self, bare: Any, inputs: Inputs, num_items: Any, pair: list[int], shares: list[float]) -> None:
        """Two samples do not fit with gradients: their losses in training mode are compared, and the rest is said."""
        device, size = self.trainer.args.device, self.size(inputs)
        assert size is not None
        self.draws = Learned()
        bare.zero_grad()
        give_memory_back(device)
        state, loss_of = replay.snapshot(device), self._loss_of(bare, num_items)
        with torch.no_grad(), Draws(self.draws, None):
            whole = loss_of(split_batch.take(inputs, pair, size))
        losses = []
        for place, row in enumerate(pair):
            replay.restore_torch(state)
            with torch.no_grad(), Draws(self.draws, Rows(start=place, count=1, of=2), learns=True):
                losses.append(loss_of(split_batch.take(inputs, [row], size)))
        values = [value for value in (whole, *losses) if value is not None]
        if self.draws.permutes:
            raise CannotCut(_mixed(f"the model draws a permutation ({self.draws.other})"))
        if len(values) == 3 and self.draws.other is None and not replay.moved_on_the_host(state):
            apart = abs(values[0] - shares[0] * values[1] - shares[1] * values[2])
            if apart > self.loss_shape(inputs).tolerance * max(map(abs, values)):
                raise CannotCut(_mixed("in training mode the loss of two samples is not made of the losses of each"))
        if not self._said_unchecked:
            self._said_unchecked = True
            say("hfopt: two samples do not fit together, so only the losses of pieces were compared with the whole's, not their gradients")

    def _one(self, model: Any, part: Inputs, num_items: Any, share: float) -> torch.Tensor:
        self.phase, self._weight, self._backwards = "forward", share, 0
        try:
            loss = self._step(model, part, num_items) * (share * self.scale)
        finally:
            self._weight = 1.0
        if self._backwards != 1:
            raise CannotCut(_not_one_backward(self._backwards))
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
        bare = self._accelerator.unwrap_model(model)
        loss_of = self._loss_of(bare, num_items)
        try:
            with self._without_a_trace(bare):
                whole = loss_of(inputs)
                losses = [loss_of(part) if share else 0.0 for part, share in zip(parts, shares, strict=True)]
        except oom_errors.RAISED_AS as error:
            if oom_errors.recognise(error) is None:
                raise
            return
        values = [loss for loss in losses if loss is not None]
        if whole is None or len(values) < len(losses):
            return
        summed = sum(share * loss for share, loss in zip(shares, values, strict=True))
        if abs(summed - whole) > tolerance * max(abs(whole), *map(abs, values)):
            reason = "the losses of its pieces, weighted by their labels or samples, do not make up the loss of the micro-batch"
            raise CannotCut(Refusal(name="contrastive", reason=reason, batch_bound=True))
        self._verified += 1
        self._verify_at = self._twice_as_late()

    def _twice_as_late(self) -> int:
        """A term may grow from nothing (warmed up, or the distance from a reference model): it is looked for again, ever more rarely."""
        step = int(self.trainer.state.global_step)
        return max(step + 1, 2 * step)

    def size(self, inputs: Inputs) -> int | None:
        return split_batch.batch_size(inputs, getattr(self.trainer.model, "main_input_name", None))

    def refusal(self, model: Any, inputs: Inputs, num_items: Any) -> Refusal | None:
        """Why this micro-batch cannot be run in pieces; settles the rule on the way."""
        size = self.size(inputs)
        bare = self._accelerator.unwrap_model(model)
        refused = split_batch.structural_refusal(bare, self.trainer) or split_batch.why_not(inputs, size)
        if refused is not None or size is None or size == 1 or (self.rule is not None and self.rule.settled):
            return refused
        found = self.find_rule(model, inputs, num_items, size)
        return found if isinstance(found, Refusal) else None

    def find_rule(self, model: Any, inputs: Inputs, num_items: Any, size: int) -> Rule | Refusal:
        bare = self._accelerator.unwrap_model(model)
        try:
            with self._without_a_trace(bare):
                found = split_batch.find_rule(
                    inputs, size, self.loss_shape(inputs), self._loss_of(bare, num_items), self._expected(num_items)
                )
        except torch.OutOfMemoryError:
            found = Refusal(name="untried", reason="not even two samples fit without gradients")
        except _CANNOT_TAKE_PART as error:
            text = str(error).partition("\n")[0]
            found = Refusal(name="indivisible", reason=f"the loss cannot be computed for a part of the batch: {text}", batch_bound=True)
        if isinstance(found, Rule):
            self.rule = found
        return found

    def keep_scale(self, model: Any, inputs: Inputs, num_items: Any, accumulation: int) -> None:
        """A restart has changed the accumulation; gradients and logged loss stay as with the script's own.

        Only a head that ignores the number of items makes a difference; whether it does is tried.
        """
        if num_items is None or self._expected(num_items)[0] != "sum":
            return
        bare = self._accelerator.unwrap_model(model)
        with self._without_a_trace(bare):
            once, twice = (self._loss_of(bare, items)(inputs) for items in (num_items, 2 * num_items))
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

    def _loss_of(self, bare: Any, num_items: Any) -> split_batch.LossOf:
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
            label_name=label, shifted=label != "shift_labels" and _shifts_labels(trainer), tolerance=_tolerance(trainer, self._accelerator)
        )


def _not_one_backward(count: int) -> Refusal:
    times = "never" if count == 0 else f"{count} times"
    return Refusal(name="own_backward", reason=f"training_step runs accelerator.backward {times} per micro-batch", batch_bound=True)


def _mixed(reason: str) -> Refusal:
    return Refusal(name="mixed_samples", reason=reason, batch_bound=True)


def _gradient_norm(model: torch.nn.Module) -> float:
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
