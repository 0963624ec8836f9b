"""Memory that creeps up is found with what grows; warm-up, noise and steps up are not taken for it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from hfopt.monitor import evidence
from hfopt.monitor.evidence import GrowthWatch, MemoryTrend, anonymous_bytes, census, what_grows
from hfopt.units import MIB

KEPT: list[torch.Tensor] = []


def grown(sizes: list[float], kind: str = "card") -> MemoryTrend:
    growth = MemoryTrend(kind=kind)
    for number, size in enumerate(sizes):
        growth.add(10 * (number + 1), round(size * MIB))
    return growth


def test_a_steady_rise_is_seen_with_its_slope() -> None:
    assert grown([1000 + 10 * n for n in range(20)]).bytes_per_step() == pytest.approx(MIB)
    many = grown([1000 + n for n in range(1000)])
    assert many.bytes_per_step() == pytest.approx(0.1 * MIB) and len(many.points) <= 60


noise = random.Random(0)


@pytest.mark.parametrize(
    "sizes",
    [
        [1000.0] * 30,
        [1000 + noise.uniform(-40, 40) for _ in range(40)],  # lengths that vary
        [500, 800, 950, 1000, *[1010.0] * 30],  # warm-up
        [1000.0] * 15 + [1200.0] * 15,  # a larger evaluation, once
        [1000 + 0.1 * n for n in range(30)],  # less than noise
        [1000 + 10 * n for n in range(8)],  # too short to say
    ],
    ids=["flat", "noise", "warm-up", "one step up", "little", "short"],
)
def test_what_is_no_creep(sizes: list[float]) -> None:
    assert grown(sizes).bytes_per_step() is None


def test_what_grows_is_named() -> None:
    before = census()
    weight = torch.ones(3, requires_grad=True)
    KEPT.extend((weight * number).sum() for number in range(50))
    found = what_grows(before, census())
    KEPT.clear()
    assert found is not None and found.startswith("50 more of tensor float32[] with its graph") and ".item()" in found
    assert what_grows(before, before) is None


def test_the_finding_comes_once_with_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, held = GrowthWatch(()), [100 * MIB]
    monkeypatch.setattr(evidence, "anonymous_bytes", lambda: held[0])
    found = []
    for step in range(10, 400, 10):
        held[0] += 20 * MIB
        KEPT.extend(torch.zeros(7, 5) for _ in range(10))
        found.append(watch.look(step))
    KEPT.clear()
    (finding,) = [one for one in found if one is not None]
    assert finding.cause == "memory_creep" and finding.evidence["bytes_per_step"] == pytest.approx(2 * MIB)
    assert "this process's memory grows by 2 MiB a step" in finding.message and "10 more of tensor float32[7, 5]" in finding.message


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t  500 kB\nRssFile:\t 400 kB\n")
    assert anonymous_bytes(status) == 500 * 1024
    assert anonymous_bytes(tmp_path / "none") is None
