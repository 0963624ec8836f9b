"""Whatever was drawn in between, restoring brings back the same numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hfopt.oom import replay

CPU = torch.device("cpu")
DRAWS = {
    "python": random.random,
    "numpy": np.random.random,
    "numpy normal": np.random.normal,  # makes two and keeps one
    "numpy integers": lambda: np.random.randint(1000),
    "torch": lambda: float(torch.rand(())),
}


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    before = replay.snapshot(CPU)
    yield
    replay.restore(before)


def drawn() -> list[float]:
    return [float(draw()) for draw in DRAWS.values()]


@settings(max_examples=60, deadline=None)
@given(before=st.lists(st.sampled_from(sorted(DRAWS)), max_size=4), between=st.lists(st.sampled_from(sorted(DRAWS)), max_size=4))
def test_restoring_brings_back_the_same_numbers(before: list[str], between: list[str]) -> None:
    for name in before:
        replay.snapshot(CPU)  # a state noted earlier must not be taken for this one
        DRAWS[name]()
    state = replay.snapshot(CPU)
    expected = drawn()
    replay.restore(state)
    for name in between:
        DRAWS[name]()
    replay.restore(state)
    assert drawn() == expected


def test_another_generator_of_numpy_is_noted_too() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state = replay.snapshot(CPU)
        expected = np.random.random(3)
        replay.restore(state)
        assert (np.random.random(3) == expected).all()
    finally:
        np.random.set_bit_generator(usual)
