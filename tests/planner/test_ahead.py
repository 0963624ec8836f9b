"""What will be asked for is traced in a child: its answers are those of the estimator, and its failures are nobody's."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, cast

import pytest

from hfopt.errors import TraceError
from hfopt.estimate.memory import Estimate
from hfopt.planner import ahead
from hfopt.planner.ahead import Ahead
from hfopt.schema import Checkpointing, StepSettings, Workload

PLAIN = StepSettings()
CHECKED = replace(PLAIN, checkpointing=Checkpointing(every_n_layers=1))
HALVED = replace(PLAIN, checkpointing=Checkpointing(every_n_layers=2))
WORKLOAD = cast(Workload, None)  # the estimator below does not look at it


def answer(_: Workload, settings: StepSettings) -> Estimate:
    """Says which process made it."""
    if settings == CHECKED and os.getpid() != HERE:
        raise TraceError("only the parent can")
    return Estimate(curve=cast(Any, settings), ops=(), seconds=float(os.getpid()), notes=())


HERE = os.getpid()


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_can_fork", lambda: True)


def test_answers_come_from_one_child_in_any_order() -> None:
    early = Ahead(answer)
    early.start([(WORKLOAD, PLAIN), (WORKLOAD, HALVED)])
    found = {settings: early(WORKLOAD, settings) for settings in (HALVED, PLAIN)}
    early.close()
    assert [one.curve for one in found.values()] == [HALVED, PLAIN]
    assert len({one.seconds for one in found.values()}) == 1 and found[PLAIN].seconds != HERE


def test_what_was_not_started_or_failed_there_is_made_here() -> None:
    early = Ahead(answer)
    early.start([(WORKLOAD, CHECKED), (WORKLOAD, HALVED)])
    assert early(WORKLOAD, PLAIN).seconds == HERE
    assert early(WORKLOAD, CHECKED).seconds == HERE
    assert early(WORKLOAD, HALVED).seconds != HERE
    assert early(WORKLOAD, HALVED).seconds == HERE  # an answer is given once
    early.close()


def test_a_child_nobody_asks_is_ended() -> None:
    early = Ahead(answer)
    early.start([(WORKLOAD, PLAIN)])
    assert early._child is not None
    child = early._child[0]
    early.close()
    assert not child.is_alive()
    assert early(WORKLOAD, PLAIN).seconds == HERE
