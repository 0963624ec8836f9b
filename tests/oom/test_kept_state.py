"""What a script's own code keeps between calls is seen to move, and named; what libraries keep is passed over."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hfopt.oom.kept_state import Covered, KeptState


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.drawn = torch.Generator().manual_seed(0)
        self.mean = torch.zeros(2)
        self.large = torch.zeros(70_000)
        self.made: Any = None


class Loss:
    seen = 0

    def __init__(self) -> None:
        self.queue = collections.deque([1.0], maxlen=3)
        self.table = {"calls": 0, "inner": [torch.zeros(1)]}
        self.rng, self.other = np.random.default_rng(0), random.Random(0)
        self.counts = np.zeros(3)
        self.steps, self.rows = itertools.count(), iter([1, 2, 3])
        self.teacher = torch.nn.Linear(2, 2)
        self.others = iter(torch.utils.data.DataLoader([1, 2, 3]))

    def __call__(self) -> None:
        TABLE["calls"] += 0


TABLE = {"calls": 0}


def script() -> tuple[Any, Any, Callable[[], Any]]:
    """A trainer as far as the walk looks at it, its loss, and a step with a closure."""
    loss, calls = Loss(), 0

    def step(*, move: bool = False) -> int:
        nonlocal calls
        calls += move
        return calls

    trainer = SimpleNamespace(
        accelerator=None,
        optimizer=None,
        model=Net(),
        loss=loss,
        callback_handler=SimpleNamespace(callbacks=[]),
        state=SimpleNamespace(log_history=[]),
    )
    return trainer, loss, step


def moved_by(move: Callable[[Any, Any, Any], Any]) -> str | None:
    trainer, loss, step = script()
    kept = KeptState(trainer, step)
    before = kept.look(set(), weights=True)
    assert kept.moved(before, set()) is None
    move(trainer, loss, step)
    return kept.moved(before, set())


def set_class(trainer: Any, loss: Any, step: Any) -> None:
    Loss.seen += 1


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda trainer, loss, step: torch.rand(1, generator=trainer.model.drawn), "model.drawn"),
        (lambda trainer, loss, step: trainer.model.mean.data.add_(1), "model.mean"),
        (lambda trainer, loss, step: trainer.model.large[1:2].add_(1), "model.large"),
        (lambda trainer, loss, step: trainer.model.layer.weight.data.mul_(0.9), "the weight layer.weight"),
        (lambda trainer, loss, step: loss.queue.append(2.0), "SimpleNamespace.loss.queue (its length)"),
        (lambda trainer, loss, step: loss.table.update(calls=1), "SimpleNamespace.loss.table['calls']"),
        (lambda trainer, loss, step: loss.table["inner"][0].add_(1), "SimpleNamespace.loss.table['inner'][0]"),
        (lambda trainer, loss, step: loss.rng.random(), "SimpleNamespace.loss.rng"),
        (lambda trainer, loss, step: loss.other.random(), "SimpleNamespace.loss.other"),
        (lambda trainer, loss, step: loss.counts.__setitem__(1, 5.0), "SimpleNamespace.loss.counts"),
        (lambda trainer, loss, step: next(loss.steps), "SimpleNamespace.loss.steps"),
        (lambda trainer, loss, step: next(loss.rows), "SimpleNamespace.loss.rows"),
        (lambda trainer, loss, step: next(loss.others), "SimpleNamespace.loss.others"),
        (lambda trainer, loss, step: loss.teacher.bias.data.add_(1), "SimpleNamespace.loss.teacher.bias"),
        (lambda trainer, loss, step: TABLE.update(calls=TABLE["calls"] + 1), "TABLE['calls']"),
        (set_class, "Loss.seen"),
        (lambda trainer, loss, step: step(move=True), "script.<locals>.step: calls"),
        (lambda trainer, loss, step: trainer.state.log_history.append({}), "SimpleNamespace.log"),
    ],
)
def test_what_moves_is_named(move: Callable[[Any, Any, Any], Any], name: str) -> None:
    assert f"{name} changes at every micro-batch" in str(moved_by(move))


def test_an_output_that_is_kept_with_its_graph_is_no_state() -> None:
    trainer, _, step = script()
    kept = KeptState(trainer, step)
    before = kept.look(set())
    for _ in range(2):
        trainer.model.made = trainer.model.layer(torch.rand(3, 2))
        assert kept.moved(before, set()) is None
    trainer.model.made = torch.rand(3, 2)  # left by a forward without gradients
    assert kept.moved(before, set()) is None


def test_what_can_be_put_back_is_passed_over() -> None:
    trainer, _, step = script()
    kept = KeptState(trainer, step)
    covered: Covered = {(id(trainer.model.mean), None)}
    before = kept.look(covered)
    trainer.model.mean.add_(1)
    assert kept.moved(before, covered) is None
    assert kept.moved(kept.look(set()), set()) is None


def test_an_iterator_that_does_not_tell_where_it_stands_is_never_trusted() -> None:
    trainer, loss, step = script()
    loss.rows = Opaque()
    kept = KeptState(trainer, step)
    assert "cannot be looked into" in str(kept.moved(kept.look(set()), set()))


class Unwilling:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise ArithmeticError("not to be looked at")


def test_an_object_that_raises_when_it_is_looked_at_is_never_trusted_and_stops_nothing() -> None:
    trainer, loss, step = script()
    loss.teacher = Unwilling()
    kept = KeptState(trainer, step)
    assert "ArithmeticError in SimpleNamespace.loss.teacher" in str(kept.moved(kept.look(set()), set()))


class Opaque:
    """No attributes, no place: as an iterator of a compiled library."""

    __slots__ = ()

    def __iter__(self) -> Opaque:
        return self

    def __next__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")
