"""The steps of a dry run in this process, on the CPU: with another attention, with a loss of the user's own, and where they fail."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hfopt.config.settings import with_raw
from hfopt.errors import DryRunError
from hfopt.probe import training_steps
from hfopt.probe.dry_run import Extent
from hfopt.probe.training_steps import CpuMeter, Order, measure
from hfopt.schema import Candidate, ModelSpec, TrainJob

CANDIDATE = Candidate(per_device_batch=4, accumulation=2, precision="fp32")
CODE = """
import torch
from torch import nn

class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(x)

def make_batch(samples):
    return {"x": torch.ones(samples, 8)}

def compute_loss(model, batch):
    return model(**batch).square().mean()
"""


@pytest.fixture(autouse=True)
def as_in_the_child() -> Iterator[None]:
    said = transformers.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(said)


@pytest.fixture
def run(tiny_job: TrainJob, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def start(told: Any = (CANDIDATE, None), *, job: TrainJob = tiny_job, **extent: Any) -> dict[str, Any]:
        order = Order(job=job, device="cpu", extent=Extent(**extent))
        return measure(order, told if callable(told) else lambda: told, tmp_path / "output")

    return start


def test_a_candidate_with_another_attention_is_built_anew(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str | None] = []
    known = training_steps.from_job
    monkeypatch.setattr(training_steps, "from_job", lambda job: built.append(job.model.attn_implementation) or known(job))
    facts = run((replace(CANDIDATE, attn_implementation="eager"), None))
    assert facts["outcome"] == "ok" and facts["step_s"] > 0 and facts["cpu_s"] > 0
    assert built == [None, "eager"]


def test_a_loss_of_the_users_own_trains_and_evaluates(run: Any, tiny_job: TrainJob, tmp_path: Path) -> None:
    code = tmp_path / "scorer.py"
    code.write_text(CODE)
    job = with_raw(replace(tiny_job, model=ModelSpec(name=f"{code}:Scorer", trust_remote_code=True)), {"do_eval": True})
    facts = run(job=job)
    assert facts["outcome"] == "ok" and facts["eval_peak_reserved_bytes"] > 0


def test_enough_is_enough_after_a_few_steps(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    known = training_steps.MeasuredSteps.on_step_end

    def count(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        known(self, args, state, control, **more)
        ended.append(state.global_step)

    monkeypatch.setattr(training_steps.MeasuredSteps, "on_step_end", count)
    assert run(steps=50, enough_s=0.0)["outcome"] == "ok"
    assert ended == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), MemoryError(), RuntimeError("can't allocate memory: 8")]
)
def test_running_out_of_memory_is_an_outcome(run: Any, error: Exception) -> None:
    def told() -> Any:
        raise error

    facts = run(told)
    assert facts["outcome"] == "oom" and facts["peak_device_bytes"] > 0
    assert facts["message"] == f"out of memory in loading the model, step 1: {training_steps.brief(error)}" and "\n" not in facts["message"]


def test_any_other_error_is_an_error(run: Any) -> None:
    def told() -> Any:
        raise RuntimeError("shape mismatch")

    with pytest.raises(RuntimeError, match="shape mismatch"):
        run(told)


def test_a_card_that_is_not_there_is_said(tiny_job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DryRunError, match="no CUDA device"):
        measure(Order(job=tiny_job, device="cuda", extent=Extent()), lambda: (CANDIDATE, None), tmp_path)


def test_without_the_kernels_files_the_peak_is_that_of_the_whole_life(monkeypatch: pytest.MonkeyPatch) -> None:
    known = CpuMeter._peak()
    monkeypatch.setattr(training_steps, "Path", lambda place: Path("/nowhere") / place.lstrip("/"))
    peaks = CpuMeter().peaks()
    assert peaks["peak_device_bytes"] >= 0.99 * known and peaks["peak_allocated_bytes"] < 0.5 * known
