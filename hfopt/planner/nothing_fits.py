"""Nothing fits: the smallest changes that would, each computed by the same estimate, from the least intrusive to the most.

Tried in this order, alone first and then together: freeing what was kept, 8-bit Adam, LoRA, a 4-bit base with LoRA, a shorter length,
sharding over N cards, a larger card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hfopt.errors import HfoptError, NothingFits
from hfopt.hardware import catalog
from hfopt.planner.pricing import Pricing
from hfopt.planner.request import Subject, workload_of
from hfopt.planner.search import SearchResult
from hfopt.planner.space import divisors
from hfopt.planner.target import TargetDevice
from hfopt.planner.vllm_share import advice_when_short
from hfopt.schema import Candidate, Checkpointing, Lora, MemoryPeak, Quantization, TrainJob
from hfopt.units import format_bytes

WOULD_FIT = "What would fit:"
SHORTEST = 64
MOST_CARDS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRemedy:
    """One change and how it alters the job; `words` says what the user would do."""

    words: str
    job: TrainJob


def nothing_fits(subject: Subject, device: TargetDevice, pricing: Pricing, found: SearchResult) -> NothingFits:
    """The error that says what is missing and what would fit."""
    smallest = _smallest(subject, found)
    peak = pricing.memory(smallest)
    lines = [*([] if device.vllm is None else [advice_when_short(device.vllm)]), *_remedies(subject, device, pricing, smallest, peak)]
    need = f"even {_words(smallest, device.stored_in(subject.workload))} needs {format_bytes(peak.device_bytes)}"
    hint = f"{WOULD_FIT}\n" + "\n".join(f"    - {line}" for line in lines) if lines else "no single change that hfopt knows would fit"
    beside = f" beside vLLM's {format_bytes(device.vllm.resident_bytes)}" if device.vllm is not None and not device.vllm.sleeps else ""
    return NothingFits(f"nothing fits: {need}, and {device.name} has {format_bytes(device.budget_bytes)} to plan with{beside}", hint=hint)


def _smallest(subject: Subject, found: SearchResult) -> Candidate:
    """The candidate that needs least: the smallest batch, checkpointed as far as it goes, in the lightest precision."""
    weight = {"fp16": 0, "bf16": 0, "tf32": 1, "fp32": 1}

    def load(candidate: Candidate) -> tuple[int, int, int]:
        every = candidate.checkpointing.every_n_layers
        return candidate.per_device_batch, every if every else 1 << 20, weight[candidate.precision]

    return min((rejection.candidate for rejection in found.rejected), key=load)


def _remedies(subject: Subject, device: TargetDevice, pricing: Pricing, smallest: Candidate, peak: MemoryPeak) -> Iterator[str]:
    job = subject.job
    if (freed := _freed(subject, device, pricing, smallest)) is not None:
        yield freed
        return
    single = False
    for remedy in _changes_of_the_job(subject):
        needed = _needed(subject, pricing, remedy.job, smallest)
        if needed is not None and needed.device_bytes <= device.budget_bytes:
            single = True
            yield f"{remedy.words}: {format_bytes(needed.device_bytes)}"
    if not single:
        yield from _together(subject, device, pricing, smallest)
    if (cards := _shards(peak, device)) is not None and job.world_size == 1:
        yield f"sharding over {cards} such cards (fsdp: full_shard): about {format_bytes(_sharded_bytes(peak, cards))} on each"
    if (card := _larger_card(peak, device)) is not None:
        yield f"a card with more memory: {card}"


def _freed(subject: Subject, device: TargetDevice, pricing: Pricing, smallest: Candidate) -> str | None:
    """What was kept may be all that stands in the way."""
    if not subject.job.kept:
        return None
    effective = subject.job.effective_batch // subject.job.world_size
    for batch in reversed(divisors(effective)):
        for checkpointing in (Checkpointing(), Checkpointing(every_n_layers=1)):
            if checkpointing.on and not subject.workload.checkpointable:
                continue
            free = replace(smallest, per_device_batch=batch, accumulation=effective // batch, checkpointing=checkpointing)
            if batch < smallest.per_device_batch or checkpointing.on:
                limit = pricing.largest_batch(free)
                if limit is not None and batch <= limit:
                    return f"{_words(free, device.stored_in(subject.workload))} would: leave {', '.join(sorted(subject.job.kept))} free"
    return None


def _changes_of_the_job(subject: Subject) -> Iterator[MemoryRemedy]:
    job = subject.job
    full = job.model.lora is None
    if full and "8bit" not in str(job.args.get("optim", "")):
        yield MemoryRemedy(words="8-bit Adam (optim: adamw_bnb_8bit)", job=replace(job, args={**job.args, "optim": "adamw_bnb_8bit"}))
    if full:
        yield MemoryRemedy(words="LoRA on all linear layers (r=16)", job=_with_lora(job))
    if job.model.quantization is None:
        base = job if not full else _with_lora(job)
        yield MemoryRemedy(words="a 4-bit base (QLoRA)", job=replace(base, model=replace(base.model, quantization=Quantization(bits=4))))
    length = subject.workload.shape.length
    while length is not None and length // 2 >= SHORTEST:
        length //= 2
        yield MemoryRemedy(words=f"sequences of at most {length} tokens", job=replace(job, data=replace(job.data, max_length=length)))


def _with_lora(job: TrainJob) -> TrainJob:
    return replace(job, model=replace(job.model, lora=Lora(r=16, alpha=32, target_modules="all-linear")))


def _together(subject: Subject, device: TargetDevice, pricing: Pricing, smallest: Candidate) -> Iterator[str]:
    """No single change is enough: a 4-bit base with LoRA and ever shorter sequences."""
    job = _with_lora(subject.job)
    job = replace(job, model=replace(job.model, quantization=Quantization(bits=4)))
    length = subject.workload.shape.length
    while length is not None and length // 2 >= SHORTEST:
        length //= 2
        shorter = replace(job, data=replace(job.data, max_length=length))
        needed = _needed(subject, pricing, shorter, smallest)
        if needed is not None and needed.device_bytes <= device.budget_bytes:
            yield f"a 4-bit base (QLoRA) and sequences of at most {length} tokens: {format_bytes(needed.device_bytes)}"
            return


def _needed(subject: Subject, pricing: Pricing, job: TrainJob, smallest: Candidate) -> MemoryPeak | None:
    """The same smallest candidate of the changed job; None where it cannot be built or traced here."""
    base = replace(pricing.base, optim=str(job.args.get("optim") or pricing.base.optim))
    try:
        changed = replace(pricing, workload=workload_of(job), base=base)
        return changed.memory(smallest)
    except HfoptError:
        return None


def _shards(peak: MemoryPeak, device: TargetDevice) -> int | None:
    cards = 2
    while cards <= MOST_CARDS:
        if _sharded_bytes(peak, cards) <= device.budget_bytes:
            return cards
        cards *= 2
    return None


def _sharded_bytes(peak: MemoryPeak, cards: int) -> int:
    parts = peak.breakdown
    if parts is None:
        return peak.device_bytes
    states = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes
    return peak.device_bytes - states + states // cards


def _larger_card(peak: MemoryPeak, device: TargetDevice) -> str | None:
    usable: Callable[[int], bool] = lambda memory: memory * 0.94 >= peak.device_bytes  # noqa: E731
    enough = sorted(
        (card for card in catalog.cards() if usable(card.usable_bytes or card.memory_bytes)),
        key=lambda card: (card.memory_bytes, card.name),
    )
    if not enough:
        return None
    least = [card.name for card in enough if card.memory_bytes <= enough[0].memory_bytes * 1.05]
    return f"{', '.join(least[:3])} ({format_bytes(enough[0].memory_bytes)})"


def _words(candidate: Candidate, weights_dtype: str | None) -> str:
    checkpointed = " with checkpointing" if candidate.checkpointing.on else ""
    return f"a batch of {candidate.per_device_batch} in {candidate.precision_words(weights_dtype)}{checkpointed}"
