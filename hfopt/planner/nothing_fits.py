"""Nothing fits: settled by counting where that is enough, and answered with what would fit, priced in seconds and ranked.

Every remedy is priced by a rough step (`memory/layer_extrapolation.py`): weights, gradients and states are counted, the rest comes from
shallow traces, one pair for each model that is tried, or from formulas where the model itself was counted (`memory/counted_step.py`). What
does not fit by counting alone is never traced. Remedies that leave the training as it is come first, those that train something else
last; among equals the faster one first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hfopt.errors import HfoptError, NothingFits
from hfopt.hardware import catalog
from hfopt.job.subject import Subject, workload_of
from hfopt.memory.counted_step import counted_step
from hfopt.memory.layer_extrapolation import RoughStep, rough_depths, rough_step
from hfopt.memory.step_memory import state_bytes
from hfopt.memory.trace_store import kept_rough_step
from hfopt.model.stored_workload import workload_key
from hfopt.planner.remedies import EFFECTS, MemoryRemedy, remedies, together
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.grpo import advice_when_short
from hfopt.pricing.target_device import TargetDevice, traffic_of
from hfopt.schema import Candidate, Checkpointing, Sharding, StepSettings, TrainJob, Workload
from hfopt.speed.step_time import RankTraffic, StepTimer
from hfopt.units import divisors, format_bytes, format_rate

WOULD_FIT = "What would fit:"
MOST_CARDS = 64
HEAVY_SHARE = 0.8  # of the budget that weights, gradients and states take, from which on a rough look before the search pays
LONG_TOKENS = 8192  # of one sample, from which on activations alone may be too much
HOPELESS = 1.06  # of the budget: a rough step is not off by more (0.4 % for whole models, 5 % for adapters, measured against traces)
ADAPTER_MARGIN = 1.06


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedRemedy:
    remedy: MemoryRemedy
    device_bytes: int
    samples_per_s: float | None

    @property
    def line(self) -> str:
        speed = "" if self.samples_per_s is None else f", {format_rate(self.samples_per_s, 'samples')}"
        return f"{self.remedy.words}: about {format_bytes(self.device_bytes)}{speed} ({self.remedy.how})"


@dataclass(kw_only=True)
class Rescue:
    """The question whether anything fits, and what would."""

    subject: Subject
    device: TargetDevice
    pricing: Pricing
    pool: Sequence[Candidate]
    _steps: dict[Any, RoughStep | None] = field(default_factory=dict, init=False)

    # ------------------------------------------------------------------------------------------ is it hopeless?

    def hopeless(self) -> bool:
        """Surely nothing fits: by counting, or by a rough step of the candidates that need least. False says nothing."""
        if all(self.pricing.at_most(candidate) == 0 for candidate in self.pool):
            return True
        return all(self._rough_bytes(candidate) > HOPELESS * self.device.budget_bytes for candidate in self._lightest())

    def _lightest(self) -> list[Candidate]:
        """Of each precision and each optimizer the one that needs least, with accumulation and without."""
        best: dict[tuple[object, ...], Candidate] = {}
        for candidate in sorted(self.pool, key=_load):
            best.setdefault((candidate.precision, candidate.optim, candidate.use_liger_kernel, candidate.accumulation > 1), candidate)
        return list(best.values())

    @property
    def smallest(self) -> Candidate:
        return min(self.pool, key=lambda candidate: (self.pricing.least_bytes(candidate), *_load(candidate)))

    def _rough_bytes(self, candidate: Candidate) -> int:
        settings = self.pricing.settings(candidate)
        step = self._step(None, settings, candidate.per_device_batch)
        if step is None:
            return 0
        sharded = settings.sharding is not None and settings.sharding.engine != "ddp"
        needed = step.sharded_bytes(settings) if sharded else step.device_bytes(settings)
        return self._with_inputs(needed, step, settings, candidate) + self.pricing.offset_bytes

    def _with_inputs(self, needed_bytes: int, step: RoughStep, settings: StepSettings, candidate: Candidate) -> int:
        """Beside a window's further batches, or while the next window is fetched."""
        if candidate.accumulation == 1:
            return needed_bytes
        windows, held = self.pricing.windows_bytes(candidate), state_bytes(step.count, settings)
        return max(needed_bytes + windows // 2, held.weights_bytes + held.optimizer_bytes + windows)

    # ------------------------------------------------------------------------------------------ what would fit

    def error(self) -> NothingFits:
        device, smallest = self.device, self.smallest
        settings = self.pricing.settings(smallest)
        step = self._step(None, settings, smallest.per_device_batch)
        held = state_bytes(self.pricing.count, settings)
        parts = {"weights": held.weights_bytes, "gradients": held.gradients_bytes, "optimizer states": held.optimizer_bytes}
        parts["its update"] = held.update_bytes
        if (windows := 0 if step is None else self.pricing.windows_bytes(smallest)) > held.total_bytes:
            parts[f"inputs of two windows of {smallest.accumulation} batches, which the Trainer holds on the card while it fetches"] = (
                windows
            )
        words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        needs = f"at least {format_bytes(held.total_bytes)}" if step is None else f"about {format_bytes(self._known_bytes(smallest))}"
        need = f"even {_words(smallest, self.subject.workload.weights_dtype)} needs {needs} ({words})"
        beside = f" beside vLLM's {format_bytes(device.vllm.resident_bytes)}" if device.vllm is not None and not device.vllm.sleeps else ""
        message = f"nothing fits: {need}, and {device.name} has {format_bytes(device.budget_bytes)} to plan with{beside}"
        return NothingFits(message, what_would=self._told)

    def _known_bytes(self, candidate: Candidate) -> int:
        """By its own trace where there is one: a rank that accumulates whole gradients needs more than the rough step says."""
        if self.pricing.has_own_trace(candidate):
            return self.pricing.memory(candidate).device_bytes
        return self._rough_bytes(candidate)

    def _told(self) -> str:
        lines = [*self._beside_vllm(), *self.lines()]
        return f"{WOULD_FIT}\n" + "\n".join(f"    - {line}" for line in lines) if lines else "no single change that hfopt knows would fit"

    def _beside_vllm(self) -> Iterator[str]:
        if self.device.vllm is not None:
            needed = max(self._rough_bytes(self.smallest), self.pricing.least_bytes(self.smallest))
            yield from advice_when_short(self.device.vllm, self.subject, needed_bytes=needed, budget_bytes=self.device.budget_bytes)

    def lines(self) -> Iterator[str]:
        """The remedies that are enough, in their order; a freed key alone where that is all it takes."""
        if (freed := self._freed()) is not None:
            yield freed
            return
        order = self.ranked()
        yield from (one.line for one in order if one.remedy.effect != "training")
        yield from self._other_hardware()
        yield from (one.line for one in order if one.remedy.effect == "training")

    def ranked(self) -> list[PricedRemedy]:
        """The remedies that fit: what leaves the training as it is first, among equals the faster one."""
        single = remedies(self.subject, self.pricing.base.optim)
        priced = self._priced(single)
        effects = {one.remedy.effect for one in priced}
        if not effects & {"same", "rounding"} or "training" not in effects:
            more = self._priced(tuple(together(single)))
            priced += [one for one in more if one.remedy.effect not in effects]
        return sorted(priced, key=lambda one: (EFFECTS.index(one.remedy.effect), -(one.samples_per_s or 0.0), one.device_bytes))

    def _priced(self, tried: Sequence[MemoryRemedy]) -> list[PricedRemedy]:
        """Those that fit."""
        found = [priced for one in tried if (priced := self._price(one)) is not None]
        return [one for one in found if one.device_bytes * _margin(one.remedy) <= self.device.budget_bytes]

    def _price(self, remedy: MemoryRemedy) -> PricedRemedy | None:
        candidate = self.smallest
        settings = replace(self.pricing.settings(candidate), **remedy.settings)
        if remedy.job is not None and remedy.job.model.lora is not None:
            settings = replace(settings, accumulation=1)
        if not (self._can_fit(settings) if remedy.job is None else self._could_hold(remedy.job)):
            return None
        traced_as = replace(settings, optim=self.pricing.base.optim if remedy.job is None else settings.optim)
        step = self._step(remedy.job, traced_as, candidate.per_device_batch)
        if step is None:
            return None
        step = _shortened(step, remedy.length_divided_by)
        if settings.sharding is not None and settings.sharding.engine != "ddp":
            needed = step.sharded_bytes(settings)
        elif remedy.expandable:
            needed = step.allocated_bytes(settings) + step.context_bytes
        else:
            needed = step.device_bytes(settings)
        needed = self._with_inputs(needed, step, settings, candidate)
        timed = None if remedy.length_divided_by > 1 else self._samples_per_s(step, settings)
        return PricedRemedy(remedy=remedy, device_bytes=needed + self.pricing.offset_bytes, samples_per_s=timed)

    def _can_fit(self, settings: StepSettings) -> bool:
        """By counting alone."""
        return state_bytes(self.pricing.count, settings).total_bytes <= self.device.budget_bytes

    def _could_hold(self, job: TrainJob) -> bool:
        """The weights alone, each in the fewest bytes that the job's packing or a 16-bit type leaves it."""
        packing = job.model.quantization
        bits = 16 if packing is None else packing.bits
        return self.subject.workload.parameters * bits // 8 <= self.device.budget_bytes

    def _step(self, job: TrainJob | None, settings: StepSettings, batch: int) -> RoughStep | None:
        """None where it cannot be built or traced here. The optimizer's states are counted, so that one step stands for all of them."""
        model = None if job is None else (job.model.lora is not None, job.model.quantization is not None)
        key = (model, replace(settings, optim="", sharding=None), batch)
        if key not in self._steps:
            try:
                self._steps[key] = self._traced(job, settings, batch)
            except HfoptError:
                self._steps[key] = None
        return self._steps[key]

    def _traced(self, job: TrainJob | None, settings: StepSettings, batch: int) -> RoughStep:
        workload, length = self.subject.workload, self.subject.workload.shape.length
        if workload.blocks is not None and length is not None:
            counted = counted_step(workload.blocks, (job or self.subject.job).model, settings, batch=batch, length=length)
            if counted is not None:
                return counted
        key = workload.key if job is None or workload.key is None else workload_key(job)

        def trace() -> RoughStep:
            return rough_step(self._models(job), workload.layers, settings, batch)

        return kept_rough_step(replace(workload, key=key), batch, settings, trace)

    def _models(self, job: TrainJob | None) -> list[Workload]:
        workload = self.subject.workload
        depths = rough_depths(workload)
        if job is not None:
            return [workload_of(job)] if depths is None else [workload_of(job, layers=layers) for layers in depths]
        made = [] if depths is None or workload.with_layers is None else [workload.with_layers(layers) for layers in depths]
        return [one for one in made if one is not None] or [workload]

    def _samples_per_s(self, step: RoughStep, settings: StepSettings) -> float | None:
        candidate, sharding = self.smallest, settings.sharding
        if self.pricing.speed is None:
            return None
        ranks = self.pricing.ranks if sharding == self.pricing.base.sharding else traffic_of(self.subject, sharding) if sharding else None
        timer = StepTimer(step.ops, self.pricing.speed, candidate.precision, ranks=ranks or RankTraffic())
        time = timer.at(candidate.per_device_batch, candidate.accumulation)
        paged_s = self._paged_s(settings)
        return time.samples_per_s * time.step_s / (time.step_s + paged_s)

    def _paged_s(self, settings: StepSettings) -> float:
        """Paged states cross to the card and back in every update."""
        if not settings.optim.startswith("paged_"):
            return 0.0
        unpaged = replace(settings, optim=settings.optim.removeprefix("paged_").replace("adamw_8bit", "adamw_bnb_8bit"), sharding=None)
        held = state_bytes(self.pricing.count, unpaged).optimizer_bytes
        rate = self.device.gpu.pcie_bytes_per_s if self.device.gpu is not None else None
        return 0.0 if rate is None else 2 * held / rate

    # ------------------------------------------------------------------------------------------ a freed key, other hardware

    def _freed(self) -> str | None:
        """What was kept may be all that stands in the way."""
        job, smallest = self.subject.job, self.smallest
        if not job.kept:
            return None
        effective = job.effective_batch // job.world_size
        for batch in reversed(divisors(effective)):
            for checkpointing in (Checkpointing(), Checkpointing(every_n_layers=1)):
                if checkpointing.on and not self.subject.workload.checkpointable:
                    continue
                free = replace(smallest, per_device_batch=batch, accumulation=effective // batch, checkpointing=checkpointing)
                lighter = batch < smallest.per_device_batch or checkpointing.on
                if lighter and free not in self.pool and self.pricing.least_bytes(free) <= self.device.budget_bytes:
                    limit = self.pricing.largest_batch(free)
                    if limit is not None and batch <= limit:
                        words = _words(free, self.subject.workload.weights_dtype)
                        return f"{words} would: leave {', '.join(sorted(job.kept))} free"
        return None

    def _other_hardware(self) -> Iterator[str]:
        settings = self.pricing.settings(self.smallest)
        step = self._step(None, settings, self.smallest.per_device_batch)
        if step is None:
            return
        shards = self._shards(step, settings) if self.subject.job.world_size == 1 and self.device.gpu is not None else None
        if shards is not None:
            cards, needed = shards
            yield f"sharding over {cards} such cards: about {format_bytes(needed)} on each (--num-gpus {cards} --engine fsdp2)"
        vllm = self.device.vllm
        sharded = settings.sharding is not None
        needed = (
            self._known_bytes(self.smallest) if sharded else self._with_inputs(step.device_bytes(settings), step, settings, self.smallest)
        )
        if (card := _larger_card(needed, 0.0 if vllm is None or vllm.sleeps else vllm.share)) is not None:
            yield f"a card with more memory: {card}"

    def _shards(self, step: RoughStep, settings: StepSettings) -> tuple[int, int] | None:
        if self.subject.job.model.quantization is not None:
            return None
        windows = self.pricing.windows_bytes(self.smallest) if self.smallest.accumulation > 1 else 0  # shared by the cards
        block = 2 * step.count.weights_bytes // max(1, self.subject.workload.layers or 1)  # one at work, the next gathered ahead
        cards = 2
        while cards <= MOST_CARDS:
            divided = replace(settings, sharding=Sharding(engine="fsdp2", world_size=cards, sync_each_batch=True))
            needed = step.sharded_bytes(divided) + block + windows // cards
            if needed <= self.device.budget_bytes:
                return cards, needed
            cards *= 2
        return None


def _margin(remedy: MemoryRemedy) -> float:
    return ADAPTER_MARGIN if remedy.job is not None else 1.0


def _shortened(step: RoughStep, divisor: int) -> RoughStep:
    """Activations grow with the length at least."""
    less = step.activations_bytes - step.activations_bytes // divisor
    return replace(step, above_bytes=step.above_bytes - less, activations_bytes=step.activations_bytes - less)


def _load(candidate: Candidate) -> tuple[int, int, int]:
    """The smallest batch, checkpointed as far as it goes, in the lightest precision."""
    weight = {"fp16": 0, "bf16": 0, "tf32": 1, "fp32": 1}
    every = candidate.checkpointing.every_n_layers
    return candidate.per_device_batch, every if every else 1 << 20, weight[candidate.precision]


_BOARDS = ("Jetson", "DGX Spark")  # small computers, not cards for the machine at hand


def _larger_card(needed_bytes: int, taken_share: float = 0.0) -> str | None:
    """taken_share: of any card, by vLLM beside the training."""
    cards = (card for card in catalog.cards() if not card.name.startswith(_BOARDS))
    enough = sorted(
        (card for card in cards if (card.usable_bytes or card.memory_bytes) * (0.94 - taken_share) >= needed_bytes),
        key=lambda card: (card.memory_bytes, card.name),
    )
    if not enough:
        return None
    least = [card.name for card in enough if card.memory_bytes <= enough[0].memory_bytes * 1.05]
    return f"{', '.join(least[:3])} ({format_bytes(enough[0].memory_bytes)})"


def _words(candidate: Candidate, weights_dtype: str | None) -> str:
    checkpointed = " with checkpointing" if candidate.checkpointing.on else ""
    return f"a batch of {candidate.per_device_batch} in {candidate.precision_words(weights_dtype)}{checkpointed}"
