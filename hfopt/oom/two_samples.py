"""Two samples of a micro-batch, together and alone, before its pieces are trusted.

Losses in evaluation do not show a term that only training mode has, one that is added in backward, samples that are mixed with each other,
or hooks that change gradients. So the gradient of two samples is compared with the gradients of each. The same three runs show how random
numbers are drawn (`whole_draws.py`) and how a Trainer subclass counts (`own_counts.py`). It comes again at steps that lie twice as far.

numpy and Python draw from one stream for the whole call. What three runs from the same state leave alike does not depend on the samples (a
factor, a layer left out): each piece begins with the whole's state. Where it does depend on them, the numbers are either noise of each
sample, which pieces draw otherwise, or mix samples with each other. With the same numbers, noise leaves the loss a sum of one term per
sample: changing both samples changes it by as much as changing each.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hfopt.facts import loss_rule, oom_errors
from hfopt.oom import replay, split_batch
from hfopt.oom.micro_batch import CANNOT_TAKE_PART, CannotCut, Pieces, drawn_on_the_host, gradient_norm, indivisible
from hfopt.oom.next_settings import give_memory_back, say
from hfopt.oom.replay import RngState
from hfopt.oom.split_batch import Inputs
from hfopt.oom.step_down import Refusal
from hfopt.oom.whole_draws import Draws, Learned, Rows

_GRADIENTS = 10  # times the tolerance of a loss: gradients are sums over more products
_SHUFFLES = 8  # draws of a permutation of two that may each be the one that changes nothing


class TwoSamples:
    """What they tell is left in `pieces`; what they moved is put back by who calls."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._check_at = 0  # the step at which gradients are compared again
        self._said = False

    def check(self, model: Any, inputs: Inputs, num_items: Any) -> None:
        """Where no gradient is waiting; raises where two samples together are not what each is alone."""
        pieces = self._pieces
        size = pieces.size(inputs)
        if pieces.trainer.state.global_step < self._check_at or size is None or size < 2:
            return
        if pieces.rule is None and isinstance(found := pieces.find_rule(model, inputs, num_items, size), Refusal):
            raise CannotCut(found)
        assert pieces.rule is not None
        shape = pieces.loss_shape(inputs)
        rows = split_batch.two_unlike_samples(inputs, size, shape)
        alone = [split_batch.take(inputs, [row], size) for row in rows]
        pair = split_batch.take(inputs, rows, size)
        shares = loss_rule.weights(pieces.rule.name, alone, [1, 1], shape)
        if 0.0 in shares:
            return
        self._check_at = pieces.twice_as_late()
        before = replay.snapshot(pieces.trainer.args.device)
        counts = pieces.counters.snapshot()
        for attempt in (1, 2):  # the failed step has left memory scattered
            try:
                self._gradients(model, pair, alone, shares, num_items)
                return
            except oom_errors.RAISED_AS as error:
                if oom_errors.recognise(error) is None:
                    raise
            pieces.trainer.model.zero_grad()
            give_memory_back(pieces.trainer.args.device)
            replay.restore(before)
            pieces.counters.restore(counts)
            if attempt == 2:
                try:
                    self._losses(model, pair, alone, shares, num_items)
                except CANNOT_TAKE_PART as error:  # a loss that goes backward by itself, where there are no gradients
                    if oom_errors.recognise(error) is not None:
                        raise
                    raise CannotCut(indivisible(error)) from None

    def _gradients(self, model: Any, pair: Inputs, alone: list[Inputs], shares: list[float], num_items: Any) -> None:
        pieces = self._pieces
        bare, shape = pieces.accelerator.unwrap_model(model), pieces.loss_shape(pair)
        state, counts = replay.snapshot(pieces.trainer.args.device), pieces.counters.snapshot()
        pieces.draws = Learned()
        pieces.looks_at_gradients = True
        with Draws(pieces.draws, None):
            pieces.one(bare, pair, num_items, 1.0)
        drawn = replay.of_torch(pieces.trainer.args.device)
        norms, hosts, counted = [gradient_norm(bare)], [replay.of_the_host()], [pieces.counters.snapshot()]
        for place, (one, share) in enumerate(zip(alone, shares, strict=True)):
            replay.restore(state)
            pieces.counters.restore(counts)
            with Draws(pieces.draws, Rows(start=place, count=1, of=2), learns=True):
                pieces.one(bare, one, num_items, -share)
            if pieces.draws.givable and not replay.alike(drawn, replay.of_torch(pieces.trainer.args.device)):
                pieces.draws.other = "as many numbers as its samples ask for"
            norms.append(gradient_norm(bare))
            hosts.append(replay.of_the_host())
            counted.append(pieces.counters.snapshot())
        pieces.looks_at_gradients = False
        pieces.counters.restore(counts)
        tokens = loss_rule.weights("counted", alone, [1, 1], shape)
        pieces.counters.learn(counts, counted[0], counted[1:], tokens, _GRADIENTS * shape.tolerance)
        self._draws(bare, pair, num_items, state, hosts)
        comparable = pieces.draws.other is None and all(map(math.isfinite, norms)) and not pieces.noise_on_the_host
        if comparable and norms[2] > _GRADIENTS * shape.tolerance * max(norms):
            raise CannotCut(_mixed("the gradient of two samples is not that of each alone, though their losses add up"))
        if (why := pieces.counters.refusal(counts)) is not None:
            raise CannotCut(why)

    def _losses(self, model: Any, pair: Inputs, alone: list[Inputs], shares: list[float], num_items: Any) -> None:
        """Two samples do not fit with gradients: their losses in training mode are compared, and the rest is said."""
        pieces = self._pieces
        bare, device = pieces.accelerator.unwrap_model(model), pieces.trainer.args.device
        pieces.draws = Learned()
        state, loss_of = replay.snapshot(device), pieces.loss_of(bare, num_items)
        with torch.no_grad(), Draws(pieces.draws, None):
            whole = loss_of(pair)
        hosts, losses = [replay.of_the_host()], []
        for place, one in enumerate(alone):
            replay.restore(state)
            with torch.no_grad(), Draws(pieces.draws, Rows(start=place, count=1, of=2), learns=True):
                losses.append(loss_of(one))
            hosts.append(replay.of_the_host())
        self._draws(bare, pair, num_items, state, hosts)
        values = [value for value in (whole, *losses) if value is not None]
        if len(values) == 3 and pieces.draws.other is None and not pieces.noise_on_the_host:
            apart = abs(values[0] - shares[0] * values[1] - shares[1] * values[2])
            if apart > pieces.loss_shape(pair).tolerance * max(map(abs, values)):
                raise CannotCut(_mixed("in training mode the loss of two samples is not made of the losses of each"))
        if not self._said:
            self._said = True
            say("hfopt: two samples do not fit together, so only the losses of pieces were compared with the whole's, not their gradients")

    def _draws(self, bare: Any, pair: Inputs, num_items: Any, state: RngState, hosts: list[Any]) -> None:
        pieces = self._pieces
        if pieces.draws.permutes:
            raise CannotCut(_mixed(f"the model draws a permutation ({pieces.draws.other})"))
        pieces.draws_alike = hosts[0] == hosts[1] == hosts[2]
        pieces.noise_on_the_host = not pieces.draws_alike
        if pieces.noise_on_the_host and not self._is_noise(bare, pair, num_items, state):
            raise CannotCut(drawn_on_the_host())

    def _is_noise(self, bare: Any, pair: Inputs, num_items: Any, state: RngState) -> bool:
        """Whether the loss stays a sum of one term per sample, with the same numbers drawn, several times."""
        pieces = self._pieces
        name = _main_input(pair, getattr(bare, "main_input_name", None))
        if name is None:
            return False
        other = _changed(pair[name])
        loss_of, tolerance = pieces.loss_of(bare, num_items), pieces.loss_shape(pair).tolerance
        replay.restore(state)
        for _ in range(_SHUFFLES):
            now = replay.snapshot(pieces.trainer.args.device)
            losses = []
            for first, second in ((0, 0), (1, 0), (0, 1), (1, 1)):
                replay.restore(now)
                rows = [(other if first else pair[name])[0], (other if second else pair[name])[1]]
                twin = split_batch.shallow_copy(pair)
                twin[name] = torch.stack(rows)
                with torch.no_grad():
                    losses.append(loss_of(twin))
            values = [loss for loss in losses if loss is not None and math.isfinite(loss)]
            if len(values) < len(losses) or values[0] == values[3]:
                return False
            if abs(values[0] + values[3] - values[1] - values[2]) > tolerance * max(map(abs, values)):
                return False
        return True


def _mixed(reason: str) -> Refusal:
    return Refusal(name="mixed_samples", reason=reason, batch_bound=True)


def _main_input(inputs: Inputs, name: str | None) -> str | None:
    names = [name, *inputs] if name in inputs else list(inputs)
    return next((key for key in names if isinstance(inputs[key], torch.Tensor) and inputs[key].dim() > 1), None)


def _changed(value: torch.Tensor) -> torch.Tensor:
    """Other content of the same shape: weaker signals, or tokens moved by one."""
    return value * 0.5 if value.is_floating_point() else value.roll(1, dims=-1)
