"""How a loss is made of its samples' losses: by sum, by mean, or not at all; and who divides by the accumulation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hfopt.facts.loss_rule import (
    MEANS,
    LossShape,
    evaluating,
    explains,
    is_separable,
    left_to_the_loss,
    uses_items,
    weights,
)

SHAPE = LossShape(label_name="labels", shifted=True, tolerance=1e-6)
PARTS = [
    {"labels": torch.tensor([[1, 2, -100, -100, -100]]), "attention_mask": torch.tensor([[1, 1, 0, 0, 0]])},
    {"labels": torch.tensor([[1, 2, 3, 4, -100]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 1]])},
]


def test_each_rule_has_its_own_shares() -> None:
    assert weights("sum", PARTS, [1, 1], SHAPE) == [1, 1]
    assert weights("samples", PARTS, [1, 1], SHAPE) == [0.5, 0.5]
    assert weights("counted", PARTS, [1, 1], SHAPE) == [1 / 4, 3 / 4]
    assert weights("counted_unshifted", PARTS, [1, 1], SHAPE) == [2 / 6, 4 / 6]
    assert weights("attended", PARTS, [1, 1], SHAPE) == [2 / 7, 5 / 7]


@pytest.mark.parametrize("rule", ("sum", *MEANS))
def test_a_rule_explains_only_the_loss_it_makes(rule: str) -> None:
    losses = [2.0, 5.0]
    whole = sum(share * loss for share, loss in zip(weights(rule, PARTS, [1, 1], SHAPE), losses, strict=True))
    assert [name for name in ("sum", *MEANS) if explains(name, whole, losses, PARTS, SHAPE)] == [rule]


@pytest.mark.parametrize(
    ("whole", "summed", "separable"), [(3.0, False, True), (5.6, False, False), (1.4, False, False), (7.0, True, True), (3.0, True, False)]
)
def test_two_groups(whole: float, summed: bool, separable: bool) -> None:
    assert is_separable(whole, 2.0, 5.0, summed=summed) == separable


def test_twice_the_items_halve_a_loss_that_uses_them() -> None:
    assert uses_items(4.0, 2.0) and uses_items(-4.0, -2.0)
    assert not uses_items(4.0, 4.0) and not uses_items(0.0, 0.0)


@pytest.mark.parametrize(
    ("facts", "counts", "left"),
    [
        ({"loss_is_scaled_for_ga": False, "model_accepts_loss_kwargs": True}, True, False),
        ({"model_accepts_loss_kwargs": True}, True, True),
        ({"model_accepts_loss_kwargs": True}, False, False),
        ({"model_accepts_loss_kwargs": False, "compute_loss_func": print}, False, True),
    ],
)
def test_who_divides(facts: dict[str, object], counts: bool, left: bool) -> None:
    assert left_to_the_loss(SimpleNamespace(**facts), counts_items=counts) == left


def test_modules_keep_their_own_flags() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2).eval())
    with evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not model[0](torch.zeros(1, 2)).requires_grad
    assert [module.training for module in model] == [True, False]
