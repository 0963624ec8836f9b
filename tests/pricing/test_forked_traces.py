"""What will be asked for is traced in a child: its answers are those of the estimator, and its failures are nobody's."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from hfopt.errors import TraceError
from hfopt.memory.step_memory import Estimate
from hfopt.pricing import forked_traces
from hfopt.pricing.forked_traces import ForkedTraces
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
    monkeypatch.setattr(forked_traces, "_can_fork", lambda: True)


def test_answers_come_from_one_child_in_any_order() -> None:
    early = ForkedTraces(answer)
    early.start([(WORKLOAD, PLAIN), (WORKLOAD, HALVED)])
    found = {settings: early(WORKLOAD, settings) for settings in (HALVED, PLAIN)}
    early.close()
    assert [one.curve for one in found.values()] == [HALVED, PLAIN]
    assert len({one.seconds for one in found.values()}) == 1 and found[PLAIN].seconds != HERE


def test_what_was_not_started_or_failed_there_is_made_here() -> None:
    early = ForkedTraces(answer)
    early.start([(WORKLOAD, CHECKED), (WORKLOAD, HALVED)])
    assert early(WORKLOAD, PLAIN).seconds == HERE
    assert early(WORKLOAD, CHECKED).seconds == HERE
    assert early(WORKLOAD, HALVED).seconds != HERE
    assert early(WORKLOAD, HALVED).seconds == HERE  # an answer is given once
    early.close()


def computed(_: Workload, settings: StepSettings) -> Estimate:
    """With so large a tensor that torch takes several threads, where it may."""
    torch.rand(1 << 22).sin()
    return answer(_, settings)


def test_a_child_that_computes_does_not_wait_for_its_parents_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        computed(WORKLOAD, PLAIN)
        early = ForkedTraces(computed)
        early.start([(WORKLOAD, PLAIN)])
        assert early(WORKLOAD, PLAIN).seconds != HERE
        early.close()
    finally:
        torch.set_num_threads(before)


def stuck(_: Workload, settings: StepSettings) -> Estimate:
    if os.getpid() != HERE:
        threading.Event().wait()
    return answer(_, settings)


def test_a_child_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_traces, "_LOOK_S", 0.05)
    monkeypatch.setattr(forked_traces, "_PATIENCE_S", 0.5)
    early = ForkedTraces(stuck)
    early.start([(WORKLOAD, PLAIN), (WORKLOAD, HALVED)])
    assert early._child is not None
    child = early._child[0]
    assert early(WORKLOAD, PLAIN).seconds == HERE
    assert early(WORKLOAD, HALVED).seconds == HERE
    assert not child.is_alive()
    early.close()


def test_a_child_nobody_asks_is_ended() -> None:
    early = ForkedTraces(answer)
    early.start([(WORKLOAD, PLAIN)])
    assert early._child is not None
    child = early._child[0]
    early.close()
    assert not child.is_alive()
    assert early(WORKLOAD, PLAIN).seconds == HERE


def faulty(_: Workload, settings: StepSettings) -> Estimate:
    if os.getpid() != HERE:
        raise ZeroDivisionError
    return answer(WORKLOAD, settings)


def test_a_fault_of_ours_in_the_child_ends_it_and_is_met_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_traces, "_PATIENCE_S", 1e6)
    early = ForkedTraces(faulty)
    early.start([(WORKLOAD, PLAIN)])
    assert early(WORKLOAD, PLAIN).seconds == HERE
    early.close()


def large(_: Workload, settings: StepSettings) -> Estimate:
    made = answer(WORKLOAD, settings)
    return replace(made, notes=("more than a pipe holds" * 10_000,))


def test_the_child_goes_on_while_nobody_reads(tmp_path: Path) -> None:
    """Its last errand is done though no answer was asked for."""
    done = tmp_path / "done"
    early = ForkedTraces(large)
    early.start([(WORKLOAD, PLAIN), (WORKLOAD, HALVED)], [("errand", done.touch)])
    for _ in range(600):
        if done.exists():
            break
        time.sleep(0.1)
    assert done.exists()
    assert early.made("errand") is None and early(WORKLOAD, PLAIN).seconds != HERE
    early.close()
