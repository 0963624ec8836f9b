"""Models that loop over their samples: the timeline of another batch size is the trace of that size, event by event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hfopt.errors import TraceError
from hfopt.memory.curve import MemoryCurve
from hfopt.memory.per_sample import per_sample_timeline
from hfopt.memory.step_memory import estimate
from hfopt.memory.timeline import alone
from hfopt.schema import BatchShape, StepSettings, Workload
from hfopt.trace.events import Trace
from hfopt.trace.tracer import tracer_of
from hfopt.trace.trainer_step import trainer_script
from hfopt.units import MIB

WIDTH = 64
SETTINGS = StepSettings(capability=(8, 6), multiprocessors=28)


class Looping(nn.Module):
    """What LLaVA-NeXT, Qwen-VL and RT-DETR do: a part of the work sample by sample, kept until the batch is put together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = [self.second(torch.tanh(row) * 2) for row in self.first(x)]
        return {"loss": (torch.stack(kept).mean(1) - labels).square().mean()}


def _batch(samples: int) -> dict[str, Any]:
    return {"x": torch.ones(samples, 300, WIDTH), "labels": torch.ones(samples, WIDTH)}


WORKLOAD = Workload(
    name="looping",
    model_class="Looping",
    task="custom",
    build_model=Looping,
    make_batch=_batch,
    shape=BatchShape(kind="custom"),
    compute_loss=lambda model, batch: model(**batch)["loss"],
    parameters=2 * WIDTH * (WIDTH + 1),
    trainable_parameters=2 * WIDTH * (WIDTH + 1),
)


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    with tracer_of(WORKLOAD, SETTINGS) as tracer:
        return {batch: tracer.record(trainer_script(SETTINGS, WORKLOAD.compute_loss), batch) for batch in (3, 4, 7)}


def test_another_batch_size_is_what_its_own_trace_says(traces: dict[int, Trace]) -> None:
    timeline = per_sample_timeline(traces[3], traces[4]).at(7)
    assert len(timeline) == len(traces[7].events)
    assert timeline.marks == traces[7].marks
    found, true = (MemoryCurve(one, 0, third_step_follows=True).peak(7) for one in (timeline, alone(traces[7])))
    assert found.allocated_bytes == true.allocated_bytes
    assert found.reserved_bytes == pytest.approx(true.reserved_bytes, abs=2 * MIB), "which of like blocks is freed may cost a small segment"


def test_the_curve_is_exact_and_not_a_line(traces: dict[int, Trace]) -> None:
    """Though at two samples no gradient is added in place, as it is from the third on."""
    found = estimate(WORKLOAD, SETTINGS)
    assert not any("coarse" in note for note in found.notes)
    true = MemoryCurve(alone(traces[7]), 0, third_step_follows=True).peak(7)
    assert found.curve.peak(7).allocated_bytes == true.allocated_bytes
    assert found.curve.peak(1).allocated_bytes < found.curve.peak(2).allocated_bytes
    many = found.curve.peaks([4, 9])
    assert [round(peak.allocated_bytes / found.curve.peak(peak.batch).allocated_bytes, 2) for peak in many] == [1.0, 1.0]


def test_a_model_that_does_something_else_is_refused(traces: dict[int, Trace]) -> None:
    other = replace(traces[4], events=traces[4].events[: len(traces[4].events) // 2], marks={})
    with pytest.raises(TraceError, match="does different things at batch 3 and 4"):
        per_sample_timeline(traces[3], other)
