"""Which link between cards is counted on: NVLink on the board, a bridge only where it is seen and joins all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.hardware.detect import named
from hfopt.pricing.target_device import link_of
from hfopt.schema import Hardware


def cards(name: str, count: int, *, hypothetical: bool) -> Hardware:
    return replace(named(name, count=count), hypothetical=hypothetical)


@pytest.mark.parametrize(
    ("name", "count", "hypothetical", "words"),
    [
        ("A100 SXM 80GB", 8, True, "NVLink with 300 GB/s"),
        ("RTX 3090", 2, True, "PCIe with 32 GB/s"),
        ("RTX 3090", 2, False, "NVLink with 56 GB/s"),
        ("RTX 3090", 4, False, "PCIe with 32 GB/s"),
        ("RTX 4090", 2, False, "PCIe with 32 GB/s"),
    ],
)
def test_the_link_that_is_counted_on(name: str, count: int, hypothetical: bool, words: str) -> None:
    assert link_of(cards(name, count, hypothetical=hypothetical), asked=None, nodes=1)[1] == words


def test_a_bridge_that_the_user_has_is_taken_at_their_word() -> None:
    assert link_of(cards("RTX 3090", 2, hypothetical=True), asked=("nvlink", None), nodes=1) == (56.25e9, "NVLink with 56 GB/s")
