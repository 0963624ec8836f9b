"""A plan as the planner makes one, with plain figures, for tests of what is done with plans."""

from __future__ import annotations

from made_jobs import made_job

from hfopt.planner.result import Plan
from hfopt.schema import (
    Candidate,
    Change,
    Checkpointing,
    Chosen,
    DataSpec,
    Gpu,
    Hardware,
    Host,
    LoaderPlan,
    MemoryPeak,
    ModelSpec,
    PlanFacts,
    StepTime,
)
from hfopt.units import GIB

CANDIDATE = Candidate(per_device_batch=8, accumulation=2, precision="bf16", checkpointing=Checkpointing(every_n_layers=1))
LOADER = LoaderPlan(workers=2, prefetch_factor=2, pin_memory=True, persistent_workers=True, sample_s=1e-3, measured=False, reason="")
CHOSEN = Chosen(
    candidate=CANDIDATE,
    memory=MemoryPeak(batch=8, allocated_bytes=GIB, reserved_bytes=GIB, context_bytes=0),
    time=StepTime(step_s=0.5, busy_s=0.25, samples_per_s=32.0, tokens_per_s=None, mfu=None, bound="compute"),
    loader=LOADER,
    fits=True,
)
FACTS = PlanFacts(
    job=made_job(
        path=None, section=(), trainer="Trainer", raw={}, model=ModelSpec(name="m"), data=DataSpec(), per_device_batch=4, accumulation=4
    ),
    hardware=Hardware(gpus=(Gpu(name="T4", memory_bytes=16 * GIB),), host=Host(cores=2, ram_bytes=GIB, ram_free_bytes=GIB)),
    effective_batch=16,
    budget_bytes=15 * GIB,
    before=CHOSEN,
    after=CHOSEN,
    changes=(Change(key="per_device_train_batch_size", before=4, after=8, reason="fewer launches"),),
    alternatives=(),
    rejected=(),
)
PLAN = Plan(facts=FACTS)
