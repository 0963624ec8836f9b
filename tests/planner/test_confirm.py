"""What a dry run measured corrects the curve for the job: limits move the safer way, and the search is asked again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from hfopt.errors import NothingFits
from hfopt.planner.search import SearchResult
from hfopt.planner.trials import confirmed
from hfopt.schema import Candidate, Correction, MemoryPeak, StepTime, Trial

BATCHES = (64, 32, 16, 8)


def candidate(batch: int) -> Candidate:
    return Candidate(per_device_batch=batch, accumulation=64 // batch, precision="bf16")


def correction(predicted: int, measured: int) -> Correction:
    return Correction(candidate=candidate(32), device="virtual", predicted_reserved_bytes=predicted, measured_reserved_bytes=measured)


@pytest.mark.parametrize(("predicted", "measured"), [(100, 110), (100, 90), (100, 100), (7, 13)])
def test_the_room_is_the_inverse_of_the_correction(predicted: int, measured: int) -> None:
    found = correction(predicted * 1000, measured * 1000)
    for room in (10_000, 100_000, 1_000_000):
        limit = found.predicted_room_bytes(room)
        assert found.corrected_bytes(limit) <= room + 1
        assert found.corrected_bytes(limit + 100) > room


def test_a_miss_is_read_the_safer_way() -> None:
    under, over = correction(1000, 1100), correction(1000, 900)
    assert under.corrected_bytes(2000) == 2200 and under.corrected_bytes(500) == 600
    assert over.corrected_bytes(2000) == 1900 and over.corrected_bytes(500) == 450
    assert under.memory_error == pytest.approx(-1 / 11) and over.memory_error == pytest.approx(1 / 9)


def test_nothing_measured_corrects_nothing() -> None:
    silent = Correction(candidate=candidate(8), device="cpu", predicted_step_s=2.0, measured_step_s=1.0)
    assert silent.corrected_bytes(5) == 5 and silent.predicted_room_bytes(5) == 5
    assert silent.memory_error is None and silent.time_error == pytest.approx(1.0)


@dataclass
class FakePricing:
    """Each sample is predicted to take 1000 bytes; the budget is 40,000."""

    really: int
    factor: float = 1.0
    corrections: list[Correction] = field(default_factory=list)

    def compare(self, trial: Trial) -> Correction:
        batch = trial.candidate.per_device_batch
        return correction(batch * 1000, batch * self.really)

    def nearest_memories(self, candidates: list[Candidate]) -> tuple[MemoryPeak, ...]:
        sizes = [one.per_device_batch * 1000 for one in candidates]
        return tuple(MemoryPeak(batch=1, allocated_bytes=size, reserved_bytes=size, context_bytes=0) for size in sizes)

    def correct(self, found: Correction) -> None:
        assert found.measured_reserved_bytes is not None and found.predicted_reserved_bytes is not None
        self.factor = found.measured_reserved_bytes / found.predicted_reserved_bytes
        self.corrections.append(found)

    def search(self) -> SearchResult:
        fitting = [batch for batch in BATCHES if batch * 1000 * self.factor <= 40_000]
        return SearchResult(ranked=tuple((candidate(batch), _time(batch)) for batch in fitting), rejected=())


def _time(batch: int) -> StepTime:
    return StepTime(step_s=1 / batch, busy_s=1 / batch, samples_per_s=64, tokens_per_s=None, mfu=None, bound="compute")


def run(pricing: FakePricing) -> tuple[int, int, int]:
    def trial(asked: Candidate) -> Trial:
        return Trial(device="virtual", candidate=asked, outcome="ok", peak_reserved_bytes=asked.per_device_batch * pricing.really)

    stand_in: Any = pricing
    state = confirmed(pricing.search(), pricing.search, stand_in, trial)
    return state.winner[0].per_device_batch, state.verdict.runs, len(pricing.corrections)


@pytest.mark.parametrize(
    ("really", "chosen", "runs", "corrections"),
    [
        (1005, 32, 1, 0),  # close enough
        (1100, 32, 1, 1),  # more than predicted, but within the budget
        (1300, 16, 2, 2),  # ran, and took more than may be used
        (600, 64, 2, 2),  # less than predicted: a larger batch fits, and is tried as well
    ],
)
def test_the_measurement_decides(really: int, chosen: int, runs: int, corrections: int) -> None:
    assert run(FakePricing(really=really)) == (chosen, runs, corrections)


def test_when_all_run_out_of_memory_nothing_is_planned() -> None:
    pricing: Any = FakePricing(really=1000)

    def trial(asked: Candidate) -> Trial:
        return Trial(device="cuda", candidate=asked, outcome="oom", message="CUDA out of memory")

    with pytest.raises(NothingFits, match="predicted to fit and ran out of memory"):
        confirmed(pricing.search(), pricing.search, pricing, trial)
