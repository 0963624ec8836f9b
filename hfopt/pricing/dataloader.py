"""How the data is fed: the cost of a sample, the fewest workers that keep up with the step, and the step they allow.

The cost is measured where the data is at hand, else taken from a table by kind. The loader has the fewest workers and the least prefetch
whose rate meets the step's demand with a margin, within cores and RAM.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from hfopt.job.subject import Subject
from hfopt.model.stored_workload import sample_of
from hfopt.schema import BatchShape, Candidate, Chosen, Host, LoaderPlan, MemoryPeak, StepTime
from hfopt.units import format_rate, format_seconds

MARGIN = 1.3
INLINE_SHARE = 0.02  # with 0 workers the step waits for its data: accepted up to this share
WAITING = 0.5  # a sample that keeps its core busy for less than this waits more than it computes
MOST_PER_CORE = 8  # workers on one core, however much they wait: more are rarely any use to one disk or one link
RAM_SHARE = 0.25  # of the free RAM may be held by the queues
WORKER_RAM_BYTES = (
    350 << 20
)  # a forked worker's own pages: Python, torch, the dataset's handles (resident set measured on Linux, torch 2.13)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCost:
    """What one sample costs on one core: reading, decoding, transforming, and its share of the collation."""

    mean_s: float
    deviation_s: float
    measured: bool
    source: str
    busy_share: float = 1.0  # of that time the core is busy; the rest it waits, for a disk or a network


TABLE: dict[str, tuple[float, float, str]] = {
    # modality: mean, deviation, what it is. The first four measured by benchmarks/sample_costs.py on one core of an AMD EPYC.
    "text": (60e-6, 20e-6, "tokenised text: indexing an Arrow table and padding"),
    "image": (4.2e-3, 1.0e-3, "a JPEG of 500×375: decode, resize, crop to 224, normalise"),
    "audio": (1.5e-3, 0.7e-3, "10 s of sound: read, resample, normalise"),
    "spectrogram": (11e-3, 3.5e-3, "30 s of sound to a log-mel spectrogram"),
    "image_text": (4.3e-3, 1.0e-3, "an image and its caption: the sum of both"),
    "custom": (1e-3, 1e-3, "unknown data: between text and images"),
}


def typical_cost(modality: str) -> SampleCost:
    mean_s, deviation_s, source = TABLE.get(modality, TABLE["custom"])
    return SampleCost(mean_s=mean_s, deviation_s=deviation_s, measured=False, source=source)


def measure_cost(
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    *,
    batch: int = 8,
    budget_s: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
    busy_clock: Callable[[], float] | None = None,
) -> SampleCost | None:
    """Times `dataset[i]` and the collation on the data itself, for at most `budget_s`; None when it cannot be indexed."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) == 0:
        return None
    count = len(dataset)
    stride = max(1, count // 64)
    costs: list[float] = []
    busy_clock = busy_clock or _busy_s
    started, busy_from = clock(), busy_clock()
    position = 0
    while clock() - started < budget_s and len(costs) < 64:
        indices = [(position + offset * stride) % count for offset in range(batch)]
        before = clock()
        collate([dataset[index] for index in indices])
        costs.append((clock() - before) / batch)
        position += 1
    busy_share = (busy_clock() - busy_from) / max(clock() - started, 1e-9)
    if len(costs) > 1:
        costs = costs[1:]  # the first opens files and warms caches
    return SampleCost(
        mean_s=fmean(costs),
        deviation_s=pstdev(costs) * math.sqrt(batch),  # of a single sample: the mean of `batch` varies less
        measured=True,
        source=f"measured on {len(costs) * batch} samples of the training data",
        busy_share=min(1.0, max(0.0, busy_share)),
    )


def _busy_s() -> float:
    """Seconds this thread ran or wanted to: on a loaded machine it queues for a core, and that is no waiting for data."""
    try:
        running_ns, queued_ns = (int(word) for word in Path("/proc/thread-self/schedstat").read_text().split()[:2])
    except (OSError, ValueError):
        return time.process_time()
    return (running_ns + queued_ns) / 1e9 if running_ns else time.process_time()


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What the training loop asks of the loader on one rank."""

    micro_batch: int
    step_s: float  # of one optimizer step
    accumulation: int
    batch_bytes: int  # of one micro-batch in host memory
    ranks_on_node: int = 1
    on_gpu: bool = True

    @property
    def samples_per_s(self) -> float:
        return self.micro_batch * self.accumulation / self.step_s


def plan_loader(demand: Demand, cost: SampleCost, host: Host) -> LoaderPlan:
    """The smallest sufficient number of workers, with the reason in words."""
    spare_cores = math.floor(host.cores / demand.ranks_on_node) - 1
    limit = max(0, math.floor(spare_cores / max(cost.busy_share, 1 / MOST_PER_CORE)))
    wait_share = cost.mean_s * demand.samples_per_s
    if wait_share <= INLINE_SHARE or (limit == 0 and host.cores < 2):
        return _inline(demand, cost, wait_share)
    limit = max(limit, 1)
    needed = math.ceil(MARGIN * wait_share)
    workers = min(needed, limit)
    prefetch = _prefetch(demand, cost, workers)
    by_cores = workers
    workers, prefetch = _within_ram(workers, prefetch, demand, host)
    if workers == 0:
        return _inline(demand, cost, wait_share, reason="the free RAM does not hold a worker and its queue")
    rate = format_rate(demand.samples_per_s, "samples")
    origin = "measured" if cost.measured else "typical for this data"
    count = f"{needed} worker{'' if needed == 1 else 's'}"
    reason = f"the step needs {rate} and a core makes {format_rate(1 / cost.mean_s, 'samples')} ({origin}): {count} with a margin"
    if needed == 1:  # one core is enough either way: what is gained is that the step need not wait for it
        reason = f"preparing the data takes {100 * wait_share:.1f} % of the step ({origin}): a worker does it meanwhile"
    if cost.busy_share < WAITING:
        reason += f"; it waits {100 * (1 - cost.busy_share):.0f} % of that time, so workers share the cores"
    if needed > workers:
        what = "the free RAM holds" if workers < by_cores else f"{_cores(host, demand)} can run"
        so = "so the loader will hold the step back" if workers < wait_share else "without the margin"
        reason += f"; {what} only {workers}, {so}"
    return LoaderPlan(
        workers=workers,
        prefetch_factor=prefetch,
        pin_memory=demand.on_gpu,
        persistent_workers=True,
        sample_s=cost.mean_s,
        busy_share=cost.busy_share,
        measured=cost.measured,
        reason=reason,
    )


def _cores(host: Host, demand: Demand) -> str:
    shared = f" shared by {demand.ranks_on_node} ranks" if demand.ranks_on_node > 1 else ""
    return f"{host.cores:g} core{'' if host.cores == 1 else 's'}{shared}"


def limited_by_loader(time: StepTime, loader: LoaderPlan, host: Host, *, samples: int, ranks_on_node: int = 1) -> StepTime:
    """The step as the loader lets it run, for `samples` per rank: without workers it waits for every sample, with them it is no faster
    than they are."""
    prepare_s = samples * loader.sample_s
    if loader.workers == 0:
        step_s = time.step_s + prepare_s
    else:
        cores = max(1.0, host.cores / ranks_on_node)
        step_s = max(time.step_s, prepare_s / min(loader.workers, cores / max(loader.busy_share, 1 / MOST_PER_CORE)))
    slower = step_s / time.step_s
    if slower == 1:
        return time
    return replace(
        time,
        step_s=step_s,
        samples_per_s=time.samples_per_s / slower,
        tokens_per_s=None if time.tokens_per_s is None else time.tokens_per_s / slower,
        mfu=None if time.mfu is None else time.mfu / slower,
        bound="input" if slower > 1.25 else time.bound,
        shares={**{kind: share / slower for kind, share in time.shares.items()}, "input": 1 - 1 / slower},
    )


def _inline(demand: Demand, cost: SampleCost, wait_share: float, reason: str | None = None) -> LoaderPlan:
    batch_s = cost.mean_s * demand.micro_batch
    text = reason or f"preparing a batch takes {format_seconds(batch_s)}, {100 * wait_share:.1f} % of the step: workers would gain nothing"
    return LoaderPlan(
        workers=0,
        prefetch_factor=None,
        pin_memory=demand.on_gpu,
        persistent_workers=False,
        sample_s=cost.mean_s,
        measured=cost.measured,
        reason=text,
    )


def _prefetch(demand: Demand, cost: SampleCost, workers: int) -> int:
    """Batches per worker so that the queue outlasts a slow batch: 2 is PyTorch's default, more when the cost varies."""
    batch_mean_s = cost.mean_s * demand.micro_batch
    slow_s = batch_mean_s + 3 * cost.deviation_s * math.sqrt(demand.micro_batch)
    micro_s = demand.step_s / demand.accumulation
    outlast = math.ceil(slow_s / (micro_s * workers)) if micro_s else 2
    return max(2, min(outlast, 8))


def _within_ram(workers: int, prefetch: int, demand: Demand, host: Host) -> tuple[int, int]:
    """Shrinks the queue, then the workers, until workers × prefetch × batch bytes and the workers themselves fit."""
    room = RAM_SHARE * host.ram_free_bytes / demand.ranks_on_node
    choices: Sequence[tuple[int, int]] = [(w, p) for w in range(workers, 0, -1) for p in range(prefetch, 0, -1)]
    for count, depth in choices:
        if count * (depth * demand.batch_bytes + WORKER_RAM_BYTES) <= room:
            return count, depth
    return 0, 0


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
        planned, current = (self.limited(candidate, time, loader).samples_per_s for loader in (plan, now))
        return plan.workers > now.workers and planned > (1 + TIE) * current

    def chosen(self, candidate: Candidate, time: StepTime, memory: MemoryPeak, *, fits: bool, loader: LoaderPlan) -> Chosen:
        return Chosen(candidate=candidate, memory=memory, time=self.limited(candidate, time, loader), loader=loader, fits=fits)

    def limited(self, candidate: Candidate, time: StepTime, loader: LoaderPlan) -> StepTime:
        """The step with the loader's limit."""
        samples = candidate.per_device_batch * candidate.accumulation
        return limited_by_loader(time, loader, self.machine, samples=samples, ranks_on_node=self.ranks)

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
