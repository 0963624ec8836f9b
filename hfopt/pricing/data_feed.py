"""How the data is fed: the cost of a sample (measured where the data is at hand), the loader's plan, the step it allows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hfopt.job.subject import Subject
from hfopt.model.stored_workload import sample_of
from hfopt.schema import BatchShape, Candidate, Chosen, Host, LoaderPlan, MemoryPeak, StepTime
from hfopt.speed.dataloader import WAITING, Demand, SampleCost, fed, measure_cost, plan_loader, typical_cost

KEYS = {
    "workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
}
TIE = 0.02  # as the search's ranking has it: rates closer than this are equal
TYPICAL_PIXELS = 500 * 375  # of the picture the table's cost was measured on


@dataclass(frozen=True, kw_only=True)
class Feeding:
    subject: Subject
    host: Host
    ranks: int
    on_gpu: bool

    def current(self) -> LoaderPlan:
        """What the config has now."""
        now = self.subject.job.settings.loader
        return LoaderPlan(
            workers=now.workers,
            prefetch_factor=now.prefetch_factor,
            pin_memory=now.pin_memory,
            persistent_workers=now.persistent_workers,
            sample_s=self.cost.mean_s,
            busy_share=self.cost.busy_share,
            measured=self.cost.measured,
            reason="as the config has it",
        )

    def planned(self, candidate: Candidate, time: StepTime) -> LoaderPlan:
        """The smallest loader that keeps up. The config's own stays where another would gain nothing, or have fewer workers than the user
        chose: fewer are never faster, and only shards that are not there rule them out."""
        demand = Demand(
            micro_batch=candidate.per_device_batch,
            step_s=time.step_s,
            accumulation=candidate.accumulation,
            batch_bytes=candidate.per_device_batch * self.sample_bytes,
            ranks_on_node=self.ranks,
            on_gpu=self.on_gpu,
        )
        now = self.current()
        plan = plan_loader(demand, self.cost, self.machine)
        most = self.subject.most_workers
        if most is not None and plan.workers > most:
            plan = replace(plan, workers=most, reason=f"{plan.reason}; the data has shards for {most}")
        if most is not None and now.workers > most:
            plan = replace(now, workers=max(1, most), reason=f"the data has shards for {most}")
        elif plan.workers != now.workers and not self._gains(candidate, time, plan, now):
            plan = now
        if plan.workers == now.workers:
            plan = replace(plan, persistent_workers=now.persistent_workers or plan.persistent_workers)
        if not self.on_gpu and self.cost.busy_share >= WAITING:
            plan = now  # workers would take the cores that compute
        return self._with_kept(plan, now)

    def _gains(self, candidate: Candidate, time: StepTime, plan: LoaderPlan, now: LoaderPlan) -> bool:
        """Whether the step runs faster by more than a prediction can tell apart."""
        planned, current = (self.fed(candidate, time, loader).samples_per_s for loader in (plan, now))
        return plan.workers > now.workers and planned > (1 + TIE) * current

    def chosen(self, candidate: Candidate, time: StepTime, memory: MemoryPeak, *, fits: bool, loader: LoaderPlan) -> Chosen:
        return Chosen(candidate=candidate, memory=memory, time=self.fed(candidate, time, loader), loader=loader, fits=fits)

    def fed(self, candidate: Candidate, time: StepTime, loader: LoaderPlan) -> StepTime:
        """The step with the loader's limit."""
        samples = candidate.per_device_batch * candidate.accumulation
        return fed(time, loader, self.machine, samples=samples, ranks_on_node=self.ranks)

    @cached_property
    def machine(self) -> Host:
        """The machine of a card that is not here is not known: it has the cores for the workers the config starts."""
        if not self.subject.hardware.hypothetical:
            return self.host
        return replace(self.host, cores=max(self.host.cores, self.ranks * (self.current().workers + 1)))

    @cached_property
    def cost(self) -> SampleCost:
        dataset, collate = self.subject.dataset, self.subject.collate
        if dataset is None:
            dataset, collate = _local_dataset(self.subject.job.data.dataset), list
        if dataset is not None and collate is not None:
            measured = measure_cost(dataset, collate)
            if measured is not None:
                return measured
        return _typical(self.subject.workload.shape, spectrogram=self._sample[1])

    @property
    def sample_bytes(self) -> int:
        return self._sample[0]

    @cached_property
    def _sample(self) -> tuple[int, bool]:
        """Its bytes, and whether it is a spectrogram."""
        return sample_of(self.subject.workload)

    def _with_kept(self, plan: LoaderPlan, now: LoaderPlan) -> LoaderPlan:
        kept = {name: getattr(now, name) for name, key in KEYS.items() if key in self.subject.job.fixed}
        plan = replace(plan, **kept)
        if plan.workers == 0:
            return replace(plan, prefetch_factor=None, persistent_workers=False)
        return replace(plan, prefetch_factor=plan.prefetch_factor or 2)


def _typical(shape: BatchShape, *, spectrogram: bool) -> SampleCost:
    """The table's cost for the modality; a picture larger than the table's costs by its pixels."""
    if shape.kind in ("audio", "audio_to_text"):
        return typical_cost("spectrogram" if spectrogram else "audio")
    cost = typical_cost({"text": "text", "text_to_text": "text"}.get(shape.kind, shape.kind))
    if shape.kind == "image" and shape.height and shape.width and shape.height * shape.width > TYPICAL_PIXELS:
        factor = shape.height * shape.width / TYPICAL_PIXELS
        return replace(cost, mean_s=cost.mean_s * factor, deviation_s=cost.deviation_s * factor)
    return cost


def _local_dataset(name: str | None) -> Any:
    """A dataset saved on this disk, opened without copying; None where it is elsewhere or not of that kind."""
    marks = ("dataset_info.json", "dataset_dict.json")
    if name is None or not any((Path(name) / mark).is_file() for mark in marks):
        return None
    import datasets

    opened = datasets.load_from_disk(name)
    return opened.get("train") if isinstance(opened, dict) else opened
