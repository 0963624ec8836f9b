"""A compiled step over batch and depth: its code changes from one to the next, the course of its memory does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hfopt.errors import TraceError
from hfopt.memory.phase_curve import CompiledRun, PhaseCurve, phase_curve, uncollected
from hfopt.probe.compiled_step import Moment, trace_of
from hfopt.trace.events import FREED

WEIGHT, STATE, ACTIVATION, HEAD = 10_000, 20_000, 3_000, 700


def compiled(layers: int, batch: int, *, checkpointed: bool = False) -> CompiledRun:
    """Four steps of a model of equal layers; a batch that is odd is computed with one more small block in each layer.
    checkpointed: each second layer keeps a tenth, and is computed anew in the backward."""
    events: list[tuple[int, int]] = []
    moments: list[Moment] = []

    def begin(what: str) -> None:
        moments.append(Moment(begins=what, event=len(events)))

    begin("run")
    events.extend((layer, WEIGHT) for layer in range(layers))
    begin("built")
    for step in range(4):
        begin("step")
        begin("forward")
        for layer in range(layers):
            events.append((100 + layer, ACTIVATION * batch // (10 if checkpointed and layer % 2 == 0 else 1)))
            if batch % 2:
                events.extend([(99, 8), (99, FREED)])
        events.append((98, HEAD * batch))
        begin("backward")
        events.append((97, HEAD * batch))
        for layer in reversed(range(layers)):
            if checkpointed and layer % 2 == 0:
                events.extend(20 * [(99, 8), (99, FREED)])
                events.extend([(96, 3 * ACTIVATION * batch), (96, FREED)])
            events.extend([(200 + layer, WEIGHT), (100 + layer, FREED)])
        events.extend([(97, FREED), (98, FREED)])
        begin("optimizer")
        if step == 0:
            events.extend((300 + layer, STATE) for layer in range(layers))
        events.extend((200 + layer, FREED) for layer in range(layers))
    begin("end")
    run = CompiledRun(trace=trace_of(events, moments, batch, skipped_steps=2), allocated_bytes=0, reserved_bytes=0)
    live = run.live_bytes
    return CompiledRun(trace=run.trace, allocated_bytes=live, reserved_bytes=live + 512)


def curve(*batches: int) -> PhaseCurve:
    return phase_curve([[compiled(layers, batch) for batch in batches] for layers in (2, 3)], 10.0, 0)


@pytest.mark.parametrize("batches", [(8, 16), (7, 16)])
@pytest.mark.parametrize("batch", [8, 16, 64])
def test_the_peak_of_a_deep_model_is_that_of_its_compiled_step(batches: tuple[int, int], batch: int) -> None:
    assert curve(*batches).replay(batch).allocated_bytes == pytest.approx(compiled(12, batch).allocated_bytes, rel=0.01)


def test_layers_that_are_computed_anew_amid_the_backward_count_however_deep_the_model_is() -> None:
    found = phase_curve([[compiled(layers, batch, checkpointed=True) for batch in (8, 16)] for layers in (2, 4)], 5.0, 0)
    for batch in (8, 16, 64):
        whole = compiled(12, batch, checkpointed=True).allocated_bytes
        assert whole <= found.replay(batch).allocated_bytes <= 1.05 * whole


def test_what_a_compiler_does_otherwise_at_one_depth_is_not_carried_on() -> None:
    """ViT's last block took 14 MiB more with three layers than with two or six: carried on to twelve it was some 140 MiB."""

    def with_more_at_the_end(layers: int, batch: int) -> CompiledRun:
        run = compiled(layers, batch)
        extra = HEAD * batch * (9 if layers % 2 else 1)
        events: list[tuple[int, int, int]] = []
        for index, event in enumerate(run.trace.events):
            events.append(event)
            after = run.trace.events[index + 1] if index + 1 < len(run.trace.events) else None
            if run.trace.places[event[2]].phase == "forward" and after is not None and run.trace.places[after[2]].phase == "backward":
                events[-1:] = [(10_000 + index, extra, event[2]), (10_000 + index, FREED, event[2]), event]
        changed = replace(run.trace, events=events)
        return replace(run, trace=changed, allocated_bytes=CompiledRun(trace=changed, allocated_bytes=0, reserved_bytes=0).live_bytes)

    for batch in (8, 16, 64):
        found = phase_curve([[with_more_at_the_end(layers, size) for size in (8, 16)] for layers in (2, 3)], 10.0, 0)
        least, most = (with_more_at_the_end(layers, batch).allocated_bytes for layers in (12, 13))
        assert least <= found.replay(batch).allocated_bytes <= most


def test_its_parts_add_up_and_the_moment_is_named() -> None:
    peak = curve(8, 16).peak(32)
    assert peak.breakdown is not None and peak.breakdown.total_bytes == peak.device_bytes
    assert (peak.breakdown.weights_bytes, peak.breakdown.optimizer_bytes) == (12 * WEIGHT, 12 * STATE)
    assert peak.moment == "backward, the whole model"


def test_what_the_allocator_keeps_grows_beyond_the_largest_compiled_batch() -> None:
    found = curve(8, 16)
    kept = [found.replay(batch).reserved_bytes - found.replay(batch).allocated_bytes for batch in (8, 16, 32)]
    assert kept == [512, 512, 1024]
    needed = found.replay(16).reserved_bytes
    assert found.replay(16, capacity_bytes=needed).fits and not found.replay(16, capacity_bytes=needed - 1).fits


def test_a_pool_of_cuda_graphs_grows_with_the_layers_and_the_batch() -> None:
    def kept(layers: int, batch: int) -> CompiledRun:
        run = compiled(layers, batch)
        return replace(run, reserved_bytes=run.allocated_bytes + layers * (WEIGHT + 10 * batch))

    found = phase_curve([[kept(layers, batch) for batch in (8, 16)] for layers in (2, 3)], 10.0, 0, captured=True)
    spare = [found.replay(batch).reserved_bytes - found.replay(batch).allocated_bytes for batch in (8, 16, 32)]
    assert spare == [12 * (WEIGHT + 10 * batch) for batch in (8, 16, 32)]


def test_what_waits_for_pythons_collector_is_carried_on_like_the_rest() -> None:
    def left(layers: int, batch: int) -> CompiledRun:
        return replace(compiled(layers, batch), uncollected_bytes=50 * batch + 7 * layers)

    constant, slope = uncollected([[left(layers, batch) for batch in (8, 16)] for layers in (2, 3)], 10.0)
    assert (constant, slope) == (7 * 12, 50)


def test_the_largest_batch_is_the_last_that_fits() -> None:
    found = curve(8, 16)
    largest = found.largest_batch(4_000_000)
    assert largest is not None
    assert found.replay(largest).reserved_bytes <= 4_000_000 < found.replay(largest + 1).reserved_bytes
    with pytest.raises(TraceError, match="batch size of 0"):
        found.replay(0)
