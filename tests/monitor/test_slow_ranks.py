"""The late rank is found from marks alone, wherever its extra work stands, and noise accuses nobody."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hfopt.monitor.log import RankFile, lags, lags_of_notes, read_notes

STEP_S = 0.5


def stamps(
    extra: dict[str, float], *, rank: int = 2, world: int = 4, noise_s: float = 0.002, offset_s: float = 0.0
) -> dict[int, dict[int, tuple[float, ...]]]:
    """Ranks that meet after fetching, before forward and in backward; `extra` seconds of one rank before that point."""
    dice = random.Random(0)
    found: dict[int, dict[int, tuple[float, ...]]] = {one: {} for one in range(world)}
    for step in range(20):
        start = 1e9 + step * STEP_S
        for one in range(world):
            late = {name: (seconds if one == rank else 0.0) + abs(dice.gauss(0, noise_s)) for name, seconds in extra.items()}
            clock = start + (offset_s if one == rank else 0.0)
            after = late["after backward"] if step else 0.0
            fetched = clock + 0.05 + late["data"] + after
            entered = clock + 0.15 + late["before forward"]
            ended = entered + 0.05 + late["forward"]
            found[one][step] = (fetched, entered, ended, clock + 0.4 + late["after backward"])
    return found


NONE = {"data": 0.0, "before forward": 0.0, "forward": 0.0, "after backward": 0.0}


@pytest.mark.parametrize("where", NONE)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_late_rank_and_the_place_of_its_work(where: str, world: int) -> None:
    rank = world - 1
    found = lags(stamps({**NONE, where: 0.1}, rank=rank, world=world))
    worst = max(found, key=lambda lag: lag.lag_s)
    assert worst.rank == rank and worst.where == where
    assert worst.lag_s == pytest.approx(0.1, abs=0.01) and worst.step_s == pytest.approx(STEP_S, rel=0.05)
    assert all(lag.lag_s < 0.01 for lag in found if lag.rank != rank)


def test_noise_is_nobodys_fault() -> None:
    assert all(lag.lag_s < 0.02 for lag in lags(stamps(NONE, noise_s=0.03)))


def test_clocks_of_two_hosts_may_differ() -> None:
    found = lags(stamps({**NONE, "forward": 0.1}, offset_s=7.0), one_host=False)
    worst = max(found, key=lambda lag: lag.lag_s)
    assert worst.lag_s == pytest.approx(0.1, abs=0.02) and worst.where == "forward"


def test_one_rank_or_too_few_common_steps_say_nothing() -> None:
    all_ranks = stamps(NONE)
    assert lags({0: all_ranks[0]}) == ()
    assert lags({0: all_ranks[0], 1: {step + 18: marks for step, marks in all_ranks[1].items()}}) == ()


def test_notes_of_an_earlier_run_are_passed_over(tmp_path: Path) -> None:
    for rank, marks in stamps({**NONE, "data": 0.1}).items():
        rows = [(step, *of_step) for step, of_step in marks.items()]
        RankFile(tmp_path, rank).write(stamps=rows, summary={"x": 1.0}, ended=True)  # type: ignore[arg-type]
    (tmp_path / "rank1.json").write_text("{torn")
    notes = read_notes(tmp_path, 4, since=0.0)
    assert sorted(notes) == [0, 2, 3] and notes[2]["ended"]
    assert max(lags_of_notes(notes, since=0.0), key=lambda lag: lag.lag_s).rank == 2
    assert lags_of_notes(notes, since=2e9) == ()
    assert read_notes(tmp_path, 4, since=4e9) == {}
