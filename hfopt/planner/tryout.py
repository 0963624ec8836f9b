"""Where a winner can be tried, and the child that tries it: started as soon as the job is read, it imports while the search goes on."""

from __future__ import annotations

from typing import Literal

from hfopt.errors import VirtualGpuError
from hfopt.memory.step_memory import context_bytes
from hfopt.planner.request import Progress
from hfopt.probe.arguments import Extent
from hfopt.probe.dryrun import Prepared
from hfopt.schema import REHEARSED_MICRO_BATCHES, Candidate, Gpu, Hardware, TrainJob, Trial
from hfopt.virtual.launch import available

Where = Literal["cuda", "cpu", "virtual"]
EXTENTS: dict[Where, Extent] = {
    "cuda": Extent(),
    "cpu": Extent(steps=40, enough_s=3.0),  # there the fastest of them decides among candidates, and other processes disturb
    "virtual": Extent(micro_batches=REHEARSED_MICRO_BATCHES),
}


def where_to_try(job: TrainJob, hardware: Hardware) -> Where | None:
    """The device itself, or the virtual GPU for a card that is not here; None where neither can be, and for several devices: one alone
    holds neither the buckets nor the shards of its part."""
    gpu = hardware.smallest
    if job.world_size > 1:
        return None
    if not hardware.hypothetical:
        return "cpu" if gpu is None else "cuda"
    if gpu is None or gpu.vendor != "nvidia" or gpu.capability is None:
        return None
    return "virtual" if available() is None else None


class Tryout:
    """Tries candidates one after the other, each in a child of its own; closing it ends what was started and never asked."""

    def __init__(self, progress: Progress) -> None:
        self.note: str | None = None  # why nothing can be tried, where that is news
        self._progress = progress
        self._job: TrainJob | None = None
        self._where: Where | None = None
        self._gpu: Gpu | None = None
        self._ready: Prepared | None = None

    def prepare(self, job: TrainJob, hardware: Hardware) -> None:
        self._where, self._gpu = where_to_try(job, hardware), hardware.smallest
        self._job = job
        try:
            self._ready = self._start()
        except VirtualGpuError as error:
            self._where, self.note = None, f"not rehearsed: {error}"

    def __call__(self, candidate: Candidate, eval_batch: int | None = None) -> Trial | None:
        if self._where is None:
            return None
        if self._where == "virtual" and (own := _own_kernels(candidate)) is not None:
            self.note = f"not rehearsed: {own} brings CUDA code of its own, which the virtual GPU does not run"
            return None
        device = self._gpu.name if self._gpu is not None else "the CPU"
        virtual = " (virtual)" if self._where == "virtual" else ""
        self._progress(f"trying {candidate.per_device_batch} × {candidate.accumulation} on {device}{virtual}")
        ready, self._ready = self._ready or self._start(), None
        assert ready is not None
        with ready:
            return ready.run(candidate, eval_batch=eval_batch)

    def close(self) -> None:
        if self._ready is not None:
            self._ready.close()
            self._ready = None

    def __enter__(self) -> Tryout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Prepared | None:
        if self._where is None or self._job is None:
            return None
        gpu = self._gpu
        context = 0
        if self._where == "virtual" and gpu is not None:
            context = context_bytes(gpu.capability or (8, 0), multiprocessors=gpu.sms)
        return Prepared(self._job, device=self._where, gpu=gpu, context_bytes=context, extent=EXTENTS[self._where])


def _own_kernels(candidate: Candidate) -> str | None:
    if candidate.use_liger_kernel:
        return "liger-kernel"
    name = candidate.attn_implementation or ""
    return name if name.startswith("flash_attention") else None
