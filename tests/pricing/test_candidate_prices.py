"""Which trace answers for a candidate: an adapter's gradients are added to a trace without accumulation, a whole model's are traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from hfopt.pricing.candidate_prices import Pricing
from hfopt.schema import BatchShape, Candidate, StepSettings, Workload
from hfopt.speed.step_time import RankTraffic
from hfopt.units import GIB

ACCUMULATED = Candidate(per_device_batch=2, accumulation=4, precision="bf16")


def _pricing(*, parameters: int, trained: int, budget_bytes: int) -> Pricing:
    workload = Workload(
        name="small",
        model_class="Small",
        task="causal_lm",
        build_model=lambda: None,
        make_batch=lambda n: {},
        shape=BatchShape(kind="text"),
        parameters=parameters,
        trainable_parameters=trained,
    )
    nothing = cast(Any, None)
    return Pricing(
        workload=workload,
        base=StepSettings(),
        speed=nothing,
        budget_bytes=budget_bytes,
        ranks=RankTraffic(),
        estimator=cast(Any, pytest.fail),
    )


@pytest.mark.parametrize(
    ("parameters", "trained", "traced"),
    [
        pytest.param(8_000_000_000, 20_000_000, 1, id="an adapter: 80 MB beside 16 GB"),
        pytest.param(60_000_000, 60_000_000, 2, id="a whole small model, whose gradients are a fiftieth of the card too"),
        pytest.param(70_000_000_000, 400_000_000, 2, id="an adapter whose gradients are more than a fiftieth"),
    ],
)
def test_only_an_adapters_gradients_are_added(parameters: int, trained: int, traced: int) -> None:
    pricing = _pricing(parameters=parameters, trained=trained, budget_bytes=24 * GIB)
    assert pricing.settings(ACCUMULATED).accumulation == traced
    assert (pricing._held_bytes(ACCUMULATED) == 4 * trained) == (traced == 1)


def test_another_jobs_traces_and_bounds_are_not_taken_over() -> None:
    pricing = _pricing(parameters=1000, trained=1000, budget_bytes=GIB)
    pricing._estimates[StepSettings()] = cast(Any, "a trace")
    pricing._bounds[StepSettings(), 1.0] = 3
    shorter = replace(pricing, workload=replace(pricing.workload, name="shorter"))
    assert not shorter._estimates and not shorter._bounds
    assert pricing._estimates and pricing._bounds
