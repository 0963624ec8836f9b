"""When nothing fits: each change that alone would be enough, the ones that would together, and the cards that have the room."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hfopt.errors import WorkloadError
from hfopt.planner import nothing_fits
from hfopt.schema import BatchShape, Breakdown, Candidate, DataSpec, MemoryPeak, ModelSpec, StepSettings, TrainJob
from hfopt.units import GIB

SMALLEST = Candidate(per_device_batch=1, accumulation=8, precision="bf16")
JOB = TrainJob(
    path="c.yaml", section=(), trainer="Trainer", args={}, model=ModelSpec(name="m"), data=DataSpec(), per_device_batch=1, accumulation=8
)


def peak(gib: float, **parts: int) -> MemoryPeak:
    size = int(gib * GIB)
    whole = dict.fromkeys(Breakdown.__dataclass_fields__, 0) | parts
    return MemoryPeak(batch=1, allocated_bytes=size, reserved_bytes=size, context_bytes=0, breakdown=Breakdown(**whole) if parts else None)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The remedies for a job of 100 GiB and 512 tokens: with adapters 12 GiB, on a 4-bit base 4, with half the tokens half of that."""

    def needed(subject: Any, pricing: Any, job: TrainJob, smallest: Candidate) -> MemoryPeak:
        size = 100.0 if job.model.lora is None else 12.0 if job.model.quantization is None else 4.0
        size *= 0.9 if "8bit" in str(job.args.get("optim")) else 1.0
        return peak(size * (job.data.max_length or 512) / 512)

    def ask(budget_gib: float, whole: MemoryPeak, job: TrainJob = JOB) -> list[str]:
        subject: Any = SimpleNamespace(job=job, workload=SimpleNamespace(shape=BatchShape(kind="text", length=512), checkpointable=True))
        device: Any = SimpleNamespace(budget_bytes=int(budget_gib * GIB))
        return list(nothing_fits._remedies(subject, device, None, SMALLEST, whole))  # type: ignore[arg-type]

    monkeypatch.setattr(nothing_fits, "_needed", needed)
    return ask


def test_each_change_that_is_enough_alone_is_told_with_what_it_needs(said: Any) -> None:
    told = said(60.0, peak(100.0))
    assert "LoRA on all linear layers (r=16): 12.00 GiB" in told and "a 4-bit base (QLoRA): 4.00 GiB" in told
    assert "sequences of at most 256 tokens: 50.00 GiB" in told
    assert not any("8-bit Adam" in line for line in told)
    assert any(line.startswith("8-bit Adam") for line in said(95.0, peak(100.0)))


def test_changes_are_put_together_where_none_is_enough(said: Any) -> None:
    told = said(1.1, peak(100.0))
    assert "a 4-bit base (QLoRA) and sequences of at most 128 tokens: 1.00 GiB" in told


def test_states_are_divided_among_as_many_cards_as_it_takes(said: Any) -> None:
    whole = peak(100.0, weights_bytes=40 * GIB, gradients_bytes=20 * GIB, optimizer_bytes=36 * GIB)
    assert "sharding over 4 such cards (fsdp: full_shard): about 28.00 GiB on each" in said(30.0, whole)
    assert not any("sharding" in line for line in said(3.0, whole)), "activations are not divided"
    assert not any("sharding" in line for line in said(30.0, peak(100.0))), "what is not known in parts is not divided"
    assert not any("sharding" in line for line in said(30.0, whole, replace(JOB, world_size=2)))


def test_a_card_with_the_room_is_named_and_none_where_there_is_none(said: Any) -> None:
    (card,) = [line for line in said(0.01, peak(60.0)) if line.startswith("a card with more memory: ")]
    assert "GiB)" in card
    assert not any("a card with more memory" in line for line in said(0.01, peak(9000.0)))


def test_a_change_that_cannot_be_traced_is_no_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: TrainJob) -> None:
        raise WorkloadError("peft is not installed")

    monkeypatch.setattr(nothing_fits, "workload_of", fails)
    pricing: Any = SimpleNamespace(base=StepSettings())
    assert nothing_fits._needed(None, pricing, JOB, SMALLEST) is None  # type: ignore[arg-type]
