"""How the data is fed, as the plan decides it: what is measured, what the machine has, and what the user keeps."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hfopt.config.settings import trainer_settings
from hfopt.pricing.dataloader import Feeding
from hfopt.schema import BatchShape, Candidate, ConfigFacts, Hardware, Host, LoaderPlan, StepTime

GIB = 1 << 30
TWO_CORES = Host(cores=2, ram_bytes=64 * GIB, ram_free_bytes=48 * GIB)
CANDIDATE = Candidate(per_device_batch=64, accumulation=1, precision="bf16")


STEP = StepTime(step_s=0.32, busy_s=0.3, samples_per_s=200.0, tokens_per_s=None, mfu=None, bound="compute")


def planned(
    *,
    hypothetical: bool = False,
    on_gpu: bool = True,
    dataset: Any = None,
    most_workers: int | None = None,
    step: StepTime = STEP,
    host: Host = TWO_CORES,
    **args: Any,
) -> LoaderPlan:
    """For pictures at 200 samples/s, of which one core makes 238 by the table."""
    shape = BatchShape(kind="image", height=224, width=224)
    workload = SimpleNamespace(shape=shape, make_batch=lambda n: {"x": torch.zeros(n, 3)}, facts=ConfigFacts())
    job = SimpleNamespace(settings=trainer_settings(args), data=SimpleNamespace(dataset=None), fixed=frozenset())
    hardware = Hardware(gpus=(), host=host, hypothetical=hypothetical)
    subject: Any = SimpleNamespace(
        job=job, workload=workload, hardware=hardware, dataset=dataset, collate=list if dataset else None, most_workers=most_workers
    )
    return Feeding(subject=subject, host=host, ranks=1, on_gpu=on_gpu).planned(CANDIDATE, step)


def test_a_card_elsewhere_has_the_cores_for_the_workers_of_the_config() -> None:
    assert planned().workers == 1
    elsewhere = planned(hypothetical=True, dataloader_num_workers=2)
    assert elsewhere.workers == 2 and "hold the step back" not in elsewhere.reason


def test_no_worker_is_taken_away_on_a_guess() -> None:
    kept = planned(hypothetical=True, dataloader_num_workers=32, dataloader_prefetch_factor=4)
    assert (kept.workers, kept.prefetch_factor, kept.measured) == (32, 4, False)
    assert planned(dataloader_num_workers=32).workers == 32, "fewer than the cores would be a guess too: they may wait for a disk"
    measured = planned(dataset=Slow(waits=False), hypothetical=True, dataloader_num_workers=32)
    assert measured.measured and measured.workers == 32, "fewer would not be faster"
    assert planned(dataloader_num_workers=32, most_workers=3).workers == 3


def test_no_worker_is_added_where_nothing_is_gained() -> None:
    slow = StepTime(step_s=0.3, busy_s=0.3, samples_per_s=64 / 0.3, tokens_per_s=None, mfu=None, bound="compute")
    roomy = replace(TWO_CORES, cores=16)
    own = planned(host=roomy, dataloader_num_workers=1, step=slow)
    assert own.workers == 1 and own.reason == "as the config has it", "one makes 238 samples/s, a second would be margin"
    assert planned(host=roomy, dataloader_num_workers=1, step=replace(slow, step_s=0.1)).workers == 4


class Slow:
    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if self.waits:
            time.sleep(0.02)  # longer than a loaded machine lets it wait for a core
            return index
        return sum(i * i for i in range(50_000))


@pytest.mark.parametrize("waits", [True, False])
def test_on_the_cpu_only_workers_that_wait_pay(waits: bool) -> None:
    assert (planned(on_gpu=False, dataset=Slow(waits)).workers > 0) is waits
