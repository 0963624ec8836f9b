"""benchmarks/forked_runs.py, which plan_safety.py rests on: a candidate in a fork takes what it takes in a dry run of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfopt.probe.dry_run import dry_run
from hfopt.schema import Candidate, Gpu, TrainJob
from hfopt.units import GIB

CARD = Gpu(name="Virtual", memory_bytes=8 * GIB, capability=(8, 6), sms=28)


@pytest.mark.slow
@pytest.mark.virtual_gpu
def test_a_fork_takes_what_a_dry_run_takes(tiny_job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from forked_runs import EXTENT, ForkedRuns

    candidate = Candidate(per_device_batch=2, accumulation=2, precision="bf16")
    with ForkedRuns(CARD) as runs:
        found = runs.run(tiny_job, candidate, gpu=CARD, context_bytes=0, timeout_s=300)
    assert found["outcome"] == "ok", found.get("message")
    alone = dry_run(tiny_job, candidate, device="virtual", gpu=CARD, steps=EXTENT.steps, timeout_s=300)
    assert found["peak_reserved_bytes"] == alone.peak_reserved_bytes
    assert found["peak_allocated_bytes"] == alone.peak_allocated_bytes
