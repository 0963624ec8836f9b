"""The law of the effective batch, checked on every candidate that can be made."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfopt.errors import ConfigError
from hfopt.planner.search import Space, candidates, checkpointing_choices, micro_batches
from hfopt.schema import Checkpointing
from hfopt.units import divisors


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_in_order(number: int) -> None:
    assert list(divisors(number)) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.integers(1, 400), st.integers(1, 8), st.sampled_from([("fp32",), ("bf16", "tf32")]))
def test_every_candidate_keeps_the_effective_batch(per_device: int, world: int, precisions: tuple[str, ...]) -> None:
    space = Space(
        effective_batch=per_device * world,
        world_size=world,
        precisions=precisions,  # type: ignore[arg-type]
        checkpointings=(Checkpointing(), Checkpointing(every_n_layers=1)),
    )
    found = candidates(space)
    assert all(c.per_device_batch * c.accumulation * world == per_device * world for c in found)
    assert len(set(found)) == len(found) == len(divisors(per_device)) * len(precisions) * 2


def test_a_prime_leaves_two_ways() -> None:
    space = Space(effective_batch=97, world_size=1, precisions=("fp32",), checkpointings=(Checkpointing(),))
    assert [(c.per_device_batch, c.accumulation) for c in candidates(space)] == [(97, 1), (1, 97)]


def test_a_batch_that_cannot_be_shared_is_refused_with_a_way_out() -> None:
    space = Space(effective_batch=96, world_size=5, precisions=("fp32",), checkpointings=(Checkpointing(),))
    with pytest.raises(ConfigError) as refusal:
        candidates(space)
    assert "5 devices" in str(refusal.value) and refusal.value.hint
    assert refusal.value.hint.startswith("Use 6 or 8 devices, or ")  # the largest counts up to twice as many


def test_pinned_values_are_the_only_ones() -> None:
    common = {"effective_batch": 96, "world_size": 1, "precisions": ("fp32",), "checkpointings": (Checkpointing(),)}
    assert micro_batches(Space(batch=32, **common)) == (32,)  # type: ignore[arg-type]
    assert micro_batches(Space(accumulation=4, **common)) == (24,)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        candidates(Space(batch=7, **common))  # type: ignore[arg-type]


def test_the_trainers_multiple_is_kept() -> None:
    space = Space(effective_batch=64, world_size=2, precisions=("fp32",), checkpointings=(Checkpointing(),), batch_multiple=8)
    assert micro_batches(space) == (32, 16, 8, 4)
    divides = Space(effective_batch=64, world_size=1, precisions=("fp32",), checkpointings=(Checkpointing(),), batch_divides=12)
    assert micro_batches(divides) == (4, 2, 1)


def test_checkpointing_choices() -> None:
    off, full, half = Checkpointing(), Checkpointing(every_n_layers=1), Checkpointing(every_n_layers=2)
    assert checkpointing_choices(off, possible=False, graded=True, layers=12) == (off,)
    assert checkpointing_choices(off, possible=True, graded=False, layers=12) == (off, full)
    assert checkpointing_choices(off, possible=True, graded=True, layers=12) == (off, half, full)
    assert checkpointing_choices(off, possible=True, graded=True, layers=4) == (off, half, full)
    assert checkpointing_choices(off, possible=True, graded=True, layers=3) == (off, full)
    mine = Checkpointing(every_n_layers=1, use_reentrant=True)
    assert mine in checkpointing_choices(mine, possible=True, graded=False, layers=12)
