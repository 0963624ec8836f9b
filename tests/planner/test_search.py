"""Best-first search: the exhaustive answer, with no more traces than could matter."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfopt.planner.algorithm import own_first_where_loader_limits
from hfopt.planner.search import TIE, SearchResult, Space, best_first, candidates
from hfopt.schema import Candidate, Checkpointing, StepTime

Group = tuple[str, int]


def step(seconds: float) -> StepTime:
    return StepTime(step_s=seconds, busy_s=seconds, samples_per_s=1 / seconds, tokens_per_s=None, mfu=None, bound="compute")


@dataclass
class Arithmetic:
    """Times and limits by formula; a group must be 'traced' before its exact time is known."""

    speed: dict[Group, float]
    limit: dict[Group, int | None]
    slack: float
    bound: dict[Group, int] = field(default_factory=dict)  # no batch above it fits
    traced: set[Group] = field(default_factory=set)
    holes: frozenset[int] = frozenset()  # batches that do not fit although larger ones do
    asked: list[Candidate] = field(default_factory=list)

    def fits(self, candidate: Candidate) -> bool:
        self.asked.append(candidate)
        return candidate.per_device_batch not in self.holes

    def group(self, candidate: Candidate) -> Group:
        return candidate.precision, candidate.checkpointing.every_n_layers

    def exact_s(self, candidate: Candidate) -> float:
        return self.speed[self.group(candidate)] * (1 + 0.1 * candidate.accumulation)

    def bound_s(self, candidate: Candidate) -> float:
        return self.exact_s(candidate) * (1 if self.known(candidate) else self.slack)

    def time(self, candidate: Candidate) -> StepTime:
        self.traced.add(self.group(candidate))
        return step(self.exact_s(candidate))

    def largest_batch(self, candidate: Candidate) -> int | None:
        return self.limit[self.group(candidate)]

    def known_limit(self, candidate: Candidate) -> int | None:
        return self.limit[self.group(candidate)]

    def at_most(self, candidate: Candidate) -> int | None:
        return self.bound.get(self.group(candidate))

    def known(self, candidate: Candidate) -> bool:
        return self.group(candidate) in self.traced


def every(effective: int) -> tuple[Candidate, ...]:
    steps = tuple(Checkpointing(every_n_layers=n) for n in (0, 2, 1))
    return candidates(Space(effective_batch=effective, world_size=1, precisions=("fp32", "bf16"), checkpointings=steps))


GROUPS = [(p, n) for p in ("fp32", "bf16") for n in (0, 1, 2)]
MODELS = st.builds(
    Arithmetic,
    speed=st.fixed_dictionaries({g: st.floats(1, 10) for g in GROUPS}),
    limit=st.fixed_dictionaries({g: st.one_of(st.none(), st.integers(1, 200)) for g in GROUPS}),
    slack=st.floats(0, 1),
    holes=st.frozensets(st.integers(1, 200)),
)


@settings(max_examples=200)
@given(st.integers(1, 200), MODELS)
def test_the_first_is_as_good_as_an_exhaustive_search_finds(effective: int, models: Arithmetic) -> None:
    pool = every(effective)
    found = best_first(pool, models, 1 << 30)
    within = [c for c in pool if (models.largest_batch(c) or 0) >= c.per_device_batch]
    fitting = [c for c in within if c.per_device_batch not in models.holes]
    if not fitting:
        assert not found.ranked
        return
    assert found.ranked[0][1].step_s <= min(models.exact_s(c) for c in fitting) * (1 + TIE)
    assert {c for c, _ in found.ranked} <= set(within) and found.ranked[0][0] in fitting


@given(st.integers(1, 200), MODELS)
def test_every_candidate_is_ranked_or_has_a_reason(effective: int, models: Arithmetic) -> None:
    pool = every(effective)
    found = best_first(pool, models, 1 << 30)
    assert {c for c, _ in found.ranked} | {r.candidate for r in found.rejected} == set(pool)
    assert len(found.ranked) + len(found.rejected) == len(pool)


def test_what_cannot_win_is_not_traced() -> None:
    slow = {g: 1.0 if g == ("bf16", 0) else 5.0 for g in GROUPS}
    models = Arithmetic(speed=slow, limit=dict.fromkeys(GROUPS, 1000), slack=0.9)
    found = best_first(every(64), models, 1 << 30)
    assert models.traced == {("bf16", 0)}
    assert found.ranked[0][0] == Candidate(per_device_batch=64, accumulation=1, precision="bf16")
    reasons = {r.candidate: r.reason for r in found.rejected}
    whole = Candidate(per_device_batch=64, accumulation=1, precision="fp32")
    assert reasons[whole] == "at least 350 % slower than the best that fits: not traced"  # 0.9 × 5 s against 1 s


def test_what_may_tie_with_the_best_is_traced_and_ranked() -> None:
    speed = {**dict.fromkeys(GROUPS, 1.5), ("bf16", 0): 1.0, ("fp32", 0): 1.0 + TIE / 2, ("bf16", 2): 1.0 + TIE}
    models = Arithmetic(speed=speed, limit=dict.fromkeys(GROUPS, 1000), slack=1.0)
    found = best_first(every(64), models, 1 << 30)
    assert models.traced == {("bf16", 0), ("fp32", 0), ("bf16", 2)}
    assert Candidate(per_device_batch=64, accumulation=1, precision="fp32") in {candidate for candidate, _ in found.ranked}


def test_what_surely_does_not_fit_is_not_traced() -> None:
    fast = {g: 1.0 if g == ("bf16", 2) else 5.0 for g in GROUPS}
    models = Arithmetic(speed=fast, limit=dict.fromkeys(GROUPS, 1000), slack=0.0, bound={("bf16", 2): 0})
    found = best_first(every(64), models, 1 << 30)
    assert ("bf16", 2) not in models.traced
    refused = [r.reason for r in found.rejected if r.candidate.checkpointing.every_n_layers == 2 and r.candidate.precision == "bf16"]
    assert refused and all("not even one sample" in reason for reason in refused)


def test_a_bound_is_not_told_as_what_fits() -> None:
    models = Arithmetic(speed=dict.fromkeys(GROUPS, 1.0), limit=dict.fromkeys(GROUPS, 3), slack=1.0, bound={("bf16", 0): 8})
    pool = [c for c in every(64) if (c.precision, c.checkpointing.every_n_layers) == ("bf16", 0)]
    reasons = {r.candidate.per_device_batch: r.reason for r in best_first(pool, models, 1 << 30).rejected}
    assert reasons[16] == "batch 16 does not fit into 1.00 GiB: at most 8, perhaps fewer"
    assert reasons[8] == "batch 8 does not fit into 1.00 GiB: at most 3 with these settings"


def test_a_batch_as_large_as_any_that_fits_may_win() -> None:
    models = Arithmetic(speed=dict.fromkeys(GROUPS, 1.0), limit=dict.fromkeys(GROUPS, 32), slack=0.0, bound=dict.fromkeys(GROUPS, 32))
    found = best_first(every(64), models, 1 << 30)
    assert found.ranked[0][0].per_device_batch == 32


def test_a_bound_that_got_tighter_is_still_no_price() -> None:
    """The slow one promises 1 s when it is asked again and takes 10; the other takes the 2 s it promises."""
    slow, fast = (Candidate(per_device_batch=8, accumulation=1, precision=precision) for precision in ("fp32", "bf16"))

    class Tightening(Arithmetic):
        def exact_s(self, candidate: Candidate) -> float:
            return 10.0 if candidate == slow else 2.0

        def bound_s(self, candidate: Candidate) -> float:
            self.asked.append(candidate)
            return 0.0 if self.asked.count(candidate) == 1 else 1.0 if candidate == slow else 2.0

    models = Tightening(speed={}, limit=dict.fromkeys(GROUPS, 8), slack=1.0)
    assert best_first([slow, fast], models, 1 << 30).ranked[0][0] == fast


def test_the_winner_fits_at_its_own_batch_and_nobody_else_is_asked() -> None:
    """The largest batch is 38, but 36 of it does not fit: the next best is taken."""
    models = Arithmetic(speed=dict.fromkeys(GROUPS, 1.0), limit=dict.fromkeys(GROUPS, 38), slack=1.0, holes=frozenset({36}))
    pool = [c for c in every(72) if (c.precision, c.checkpointing.every_n_layers) == ("bf16", 0)]
    found = best_first(pool, models, 1 << 30)
    assert found.ranked[0][0].per_device_batch == 24
    assert [c.per_device_batch for c in models.asked] == [36, 24]
    reason = next(r.reason for r in found.rejected if r.candidate.per_device_batch == 36)
    assert reason == "batch 36 does not fit into 1.00 GiB: at this batch more is kept in the cache"


@pytest.mark.parametrize(("limit", "wins"), [(100.0, "own"), (None, "other")])
def test_what_the_loader_does_not_let_run_faster_is_no_gain(limit: float | None, wins: str) -> None:
    own = Candidate(per_device_batch=4, accumulation=4, precision="bf16")
    other = Candidate(per_device_batch=16, accumulation=1, precision="bf16")

    def time(rate: float) -> StepTime:
        return StepTime(step_s=16 / rate, busy_s=0.0, samples_per_s=rate, tokens_per_s=None, mfu=None, bound="compute")

    class Loader:
        def planned(self, candidate: Candidate, alone: StepTime) -> None:
            return None

        def limited(self, candidate: Candidate, alone: StepTime, loader: object) -> StepTime:
            return time(min(alone.samples_per_s, limit or alone.samples_per_s))

    found = SearchResult(ranked=((other, time(300.0)), (own, time(200.0))), rejected=())
    first = own_first_where_loader_limits(found, own, Loader()).ranked[0][0]  # type: ignore[arg-type]
    assert first == {"own": own, "other": other}[wins]
