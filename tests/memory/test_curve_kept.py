"""A replay is made once for the same events and options, whoever asks, and its answer is the one that a replay gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hfopt import store
from hfopt.memory.allocator import AllocatorOptions
from hfopt.memory.curve import MemoryCurve, replays_kept
from hfopt.memory.evaluation import AffineBytes, EvaluationCurve
from hfopt.memory.timeline import Timeline
from hfopt.schema import EvaluationSettings
from hfopt.store import OFF, Store, default_store
from hfopt.trace.events import Where
from hfopt.units import MIB

MODEL = "a model"


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv(OFF, "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = default_store()
    assert found is not None
    return found


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batches that were replayed, not looked up."""
    made: list[int] = []
    whole = MemoryCurve._replay

    def noted(self: MemoryCurve, batch: int, *how: object) -> object:
        made.append(batch)
        return whole(self, batch, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryCurve, "_replay", noted)
    return made


def timeline(marks: dict[str, int] | None = None) -> Timeline:
    """A weight, then activations of 3 MiB a sample and a temporary that is larger than what they leave."""
    return Timeline(
        blocks=np.array([0, 1, 1, 2, 2]),
        is_free=np.array([False, False, True, False, True]),
        constants=np.array([7.0, 0, 0, 30, 0]) * MIB,
        slopes=np.array([0.0, 3, 0, 0, 0]) * MIB,
        places=[Where("forward", "model", "op")],
        place_of=np.zeros(5, dtype=np.int64),
        categories={},
        marks=marks or {},
    )


def curve(context_bytes: int = 0) -> MemoryCurve:
    return MemoryCurve(timeline(), context_bytes)


def test_another_card_with_the_same_sizes_shares_a_replay(replayed: list[int]) -> None:
    with replays_kept(MODEL, "model"):
        assert curve().replay(4) == curve(context_bytes=500 * MIB).replay(4)
    assert replayed == [4]


def test_what_was_replayed_is_known_to_the_next_process(replayed: list[int]) -> None:
    with replays_kept(MODEL, "model"):
        first = curve().replay(4)
    with replays_kept(MODEL, "model"):
        assert curve().replay(4) == first
    assert replayed == [4] and first == curve().replay(4)


def test_another_batch_option_or_capacity_is_another_replay(replayed: list[int]) -> None:
    one, other = curve(), curve()
    with replays_kept(MODEL, "model"):
        for options in (AllocatorOptions(), AllocatorOptions(expandable_segments=True)):
            for capacity in (None, 35 * MIB):
                for batch in (4, 20):
                    one.replay(batch, options, capacity_bytes=capacity)
    assert len(replayed) == 8
    assert not one.replay(20, capacity_bytes=35 * MIB).fits and one.replay(4, capacity_bytes=60 * MIB).fits
    assert [one.replay(batch) for batch in (4, 20)] == [other.replay(batch) for batch in (4, 20)]


def test_other_sizes_or_events_are_another_replay(replayed: list[int]) -> None:
    longer = timeline()
    wider = replace(longer, constants=longer.constants * 2)
    kept_alive = replace(longer, blocks=np.array([0, 1, 3, 2, 2]))
    with replays_kept(MODEL, "model"):
        found = [MemoryCurve(one, 0).replay(4) for one in (longer, wider, kept_alive)]
    assert replayed == [4, 4, 4] and len({one.allocated_bytes for one in found}) == 3


def test_replays_are_kept_although_the_plan_fails(replayed: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), replays_kept(MODEL, "model"):
        curve().replay(4)
        raise KeyboardInterrupt
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    assert replayed == [4]


def test_a_model_that_may_not_be_kept_leaves_nothing(own_store: Store, replayed: list[int]) -> None:
    with replays_kept(None, "model"):
        curve().replay(4)
    assert replayed == [4] and not list(own_store.entries())


@pytest.mark.parametrize("row", [["a", 1, 2, 3], ["a", 1, 2, 3, 1], [1, 1, 2, 3, True], "text", {"a": 1}])
def test_a_row_of_another_form_is_not_believed(own_store: Store, replayed: list[int], row: object) -> None:
    own_store.put({"what": "replays", "workload": MODEL}, [row], label="model")
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    assert replayed == [4]


def test_replays_of_another_version_are_not_believed(replayed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    monkeypatch.setattr(store, "environment", lambda: {"torch": "another"})
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    assert replayed == [4, 4]


def test_replays_changed_by_hand_are_not_believed(own_store: Store, replayed: list[int]) -> None:
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    (entry,) = own_store.entries()
    data = bytearray(entry.path.read_bytes())
    data[-1] ^= 1
    entry.path.write_bytes(bytes(data))
    entry.path.chmod(0o600)
    with replays_kept(MODEL, "model"):
        curve().replay(4)
    assert replayed == [4, 4]


def evaluation() -> EvaluationCurve:
    marks = {"evaluation_0": 0, "kept_0": 3, "evaluation_1": 3, "kept_1": 5}
    return EvaluationCurve(timeline=timeline(marks), predictions=(AffineBytes(0, MIB),), labels=())


@pytest.mark.parametrize("capacity", [None, 20 * MIB, 228589567, 228589568, 1000 * MIB])
def test_an_evaluation_is_the_same_kept_or_not_within_its_capacity_or_not(capacity: int | None) -> None:
    asked = EvaluationSettings(samples=64)
    alone = evaluation()._replayed(curve(), 4, asked, 8, capacity)
    with replays_kept(MODEL, "model"):
        found = [evaluation().replay(curve(), 4, asked, 8, capacity_bytes=capacity) for _ in range(2)]
    assert found == [alone, alone]
    assert found[0].fits == (capacity != 20 * MIB)
