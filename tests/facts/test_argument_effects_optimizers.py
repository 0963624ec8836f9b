"""What an optimizer keeps, by its name."""

from __future__ import annotations

import pytest

from hfopt.config.settings import step_settings, trainer_settings
from hfopt.facts.argument_effects import bitsandbytes_states, stand_in


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "rmsprop", "sgd", "adafactor", "galore_adamw"])
def test_other_optimizers_are_not_bitsandbytes(optim: str) -> None:
    assert bitsandbytes_states(optim) is None


@pytest.mark.parametrize(
    ("optim", "elements", "embedding", "expected"),
    [
        ("adamw_bnb_8bit", 8192, False, 2 * (8192 + 4 * 32)),
        ("adamw_bnb_8bit", 8192, True, 2 * 4 * 8192),
        ("adamw_bnb_8bit", 1000, False, 2 * 4 * 1000),
        ("paged_adamw_32bit", 200_000, False, 0),
        ("paged_adamw_32bit", 1000, False, 2 * 4 * 1000),
        ("paged_adamw_8bit", 256_000, False, 2 * 4 * 1000),
        ("lion_32bit", 1000, False, 4 * 1000),
        ("ademamix", 1000, False, 3 * 4 * 1000),
    ],
)
def test_states_by_size(optim: str, elements: int, embedding: bool, expected: int) -> None:
    known = bitsandbytes_states(optim)
    assert known is not None and known.element_bytes(elements, embedding=embedding) == expected


def test_every_optimizer_of_the_installed_transformers_can_be_planned() -> None:
    from transformers.training_args import OptimizerNames

    traced = {"adamw_torch", "adamw_torch_fused", "adamw_hf", "adafactor", "adagrad", "rmsprop", "sgd"}
    for name in (one.value for one in OptimizerNames):
        instead = stand_in(name)
        planned = name if instead is None else instead.optim
        assert planned in traced or bitsandbytes_states(planned) is not None, name
        assert instead is None or instead.why
    assert stand_in("adamw_torch") is None and stand_in("no_such_optimizer") is None
    assert step_settings(trainer_settings({"optim": "galore_adamw_layerwise"})).optim == "adamw_torch_fused"
