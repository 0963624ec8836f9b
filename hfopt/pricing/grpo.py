"""GRPO and RLOO: what they demand of their batches, what generation holds, and the share of the card that a colocated vLLM takes.

What a trainer demands of its batches, beside their product: GRPO's groups and what it generates at once. What GRPO's generation holds
beside the training, and whether it fits: every completion of a generation batch is written at once. cache = 2 (keys and values) × layers ×
key-value heads × head size × tokens × completions, in the type of the weights: rotary positions leave keys in it under autocast too, and
values are joined to what is cached in the type of the keys logits = vocabulary × completions × 3 in float32: the last token's logits,
scores and probabilities live through the next pass copies = what autocast makes of float32 weights, for the length of a forward pass

It lives while nothing of the backward does, so it is compared with what stays (weights, optimizer state, the context), not against the
step's peak. No candidate changes it: the generation batch is the user's.

TRL starts vLLM in the training process (`vllm_mode: colocate`) and hands it `vllm_gpu_memory_utilization` of the card's whole memory, for
its own copy of the weights and its key-value cache. Without sleep mode the share is gone for good. With `vllm_enable_sleep_mode` TRL puts
it to sleep at level 2 (trl/generation/vllm_generation.py): weights and cache are dropped while the model scores and trains, the weights are
taken again when they are synchronised, the cache when completions are written. A server (`vllm_mode: server`) takes nothing here.

Known limits: what a sleeping vLLM keeps (CUDA graphs, buffers outside of its pool) is not known and not counted, and one completion is
taken to be as long as the longest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hfopt.compat.versions import is_at_least, package_version
from hfopt.config.settings import EVALUATION_BATCH
from hfopt.errors import ConfigError, NothingFits
from hfopt.job.subject import Subject
from hfopt.schema import GENERATING, Assumption, Gpu, MemoryPeak, MemoryPhase, Precision, TrainJob
from hfopt.units import GIB, MIB, divisors, format_bytes

STEPS = "steps_per_generation"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRule:
    """What a trainer demands of the per-device batch."""

    multiple: int = 1  # batch × world is a multiple of this
    divides: int | None = None  # the batch divides this
    keeps_pair: bool = False
    notes: tuple[str, ...] = ()


def batch_rule(job: TrainJob) -> BatchRule:
    """GRPO generates once for `generation_batch_size` completions, whole groups of `num_generations`, and cuts them into micro-batches.

    Stated as a size it must divide into micro-batches; stated as steps the steps change with the batch, so that as much is generated at
    once; left to TRL it is the effective batch, which no candidate changes. Before TRL 0.16 each global batch had to hold whole groups.
    """
    if job.trainer not in GENERATING:
        return BatchRule()
    rollout = job.settings.rollout
    if rollout.batch is not None:
        return BatchRule(divides=max(1, rollout.batch // job.world_size))
    if rollout.steps is not None and STEPS in job.kept:
        return BatchRule(keeps_pair=True, notes=(f"{STEPS} × batch is what is generated at once, so the batch stays",))
    if rollout.steps is not None:
        return BatchRule(divides=completions_at_once(job))
    return BatchRule(multiple=group_size(job) if _old_trl() else 1)


def check_groups(job: TrainJob, effective_batch: int) -> None:
    """A generation batch that is no whole number of groups is refused: no batch size that keeps it would be accepted by TRL."""
    rollout, group = job.settings.rollout, group_size(job)
    if job.trainer not in GENERATING or not job.uses_trl or _old_trl():
        return
    by_steps = job.per_device_batch * rollout.steps * job.world_size if rollout.steps is not None else effective_batch
    total = rollout.batch or by_steps
    if total % group == 0:
        return
    per_device = max(1, total // job.world_size)
    others = [number for number in divisors(total) if number > 1]
    near = sorted(sorted(others, key=lambda number: abs(number - group))[:2])
    ways = [f"num_generations: {' or '.join(map(str, near))}"] if near else []
    if rollout.batch is not None:
        ways.append(f"generation_batch_size: {-(-total // group) * group}")
    else:
        ways.append(f"--num-gpus {job.world_size * group // math.gcd(per_device * job.world_size, group)}")
        ways += [f"--effective-batch {-(-total // group) * group}"] if rollout.steps is None else []
    raise ConfigError(
        f"num_generations {group}: the {total} completions that {job.trainer} generates at once on {job.world_size} device(s) are no whole "
        "number of groups, so TRL refuses to start with any batch size that keeps them",
        hint=f"one of these would do: {', '.join(ways)}",
    )


def steps_change(job: TrainJob, batch: int) -> tuple[tuple[str, int, str], ...]:
    """The steps that generate as much at once with another batch: key, value and reason; () where the config does not count by steps."""
    rollout = job.settings.rollout
    if job.trainer not in GENERATING or rollout.steps is None or rollout.batch is not None:
        return ()
    rows = completions_at_once(job)
    return ((STEPS, rows // batch, f"keeps {rows} completions generated at once: {batch} per device × {rows // batch}"),)


def group_size(job: TrainJob) -> int:
    """Completions of one prompt."""
    return job.settings.rollout.generations or 1


def _old_trl() -> bool:
    return package_version("trl") is not None and not is_at_least("trl", "0.16")


_HALF = frozenset({"bfloat16", "float16"})
_WORKSPACE = int(8.125 * MIB)  # cuBLAS's


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """One model writing: its shape, and in what numbers."""

    layers: int
    kv_width: int  # key-value heads × head size
    vocabulary: int
    copied_weights: int  # in 16 bits beside float32
    number_bytes: int  # of a weight

    def bytes_for(self, completions: int, tokens: int) -> int:
        cache = 2 * self.layers * self.kv_width * tokens * completions * self.number_bytes
        return cache + 3 * 4 * self.vocabulary * completions + 2 * self.copied_weights + _WORKSPACE


def completions_at_once(job: TrainJob) -> int:
    """Of one rank."""
    rollout = job.settings.rollout
    if rollout.batch is not None:
        return max(1, rollout.batch // job.world_size)
    return job.per_device_batch * rollout.steps if rollout.steps is not None else job.effective_batch // job.world_size


def check_generation(subject: Subject, peak: MemoryPeak, *, budget_bytes: int, precision: Precision, dtype: str | None) -> Iterator[str]:
    """What there is to say about it; NothingFits where every run would end in its first generation."""
    job = subject.job
    if job.trainer not in GENERATING or job.settings.rollout.uses_vllm:
        return
    tokens, writing = subject.workload.shape.length, writing_of(subject, precision=precision, dtype=dtype)
    if writing is None or tokens is None or peak.breakdown is None:
        return
    rows = completions_at_once(job)
    kept = peak.breakdown.weights_bytes + peak.breakdown.optimizer_bytes + peak.context_bytes
    need = writing.bytes_for(rows, tokens)
    taken = f"{format_bytes(need)} (key-value cache, logits) beside the {format_bytes(kept)} that stay"
    said = f"generating {rows} completions at once takes {taken}"
    if kept + need > budget_bytes:
        raise NothingFits(
            f"nothing fits: {said}, more than {format_bytes(budget_bytes)}", hint=_remedy(job, writing, tokens, budget_bytes - kept)
        )
    yield f"{said}, which fits (by rule; the same was counted on the virtual GPU)"


def evaluation_notes(subject: Subject, train_batch: int) -> tuple[str, ...]:
    """GRPO's and RLOO's evaluation generates one batch of completions and scores it: their generation and loss without gradients."""
    job = subject.job
    evaluation = job.settings.evaluation
    if job.trainer not in GENERATING or not evaluation.runs:
        return ()
    batch = evaluation.batch
    does = f"an evaluation of {job.trainer} generates and scores {batch} completions at once, without gradients"
    if batch <= min(train_batch, completions_at_once(job)):
        return (f"{does}: less than a training step, so it needs no room of its own",)
    return (
        f"{does}; that is more than the training's {train_batch}, and what it takes is not in the figures: with {EVALUATION_BATCH} at "
        f"{train_batch} or below it takes less than a training step",
    )


def _remedy(job: TrainJob, writing: Writing, tokens: int, room_bytes: int) -> str:
    group = group_size(job)
    fitting = [rows for rows in range(group, completions_at_once(job), group) if writing.bytes_for(rows, tokens) <= room_bytes]
    if fitting:
        return f"generation_batch_size: {fitting[-1] * job.world_size}, the micro-batch dividing it, generates more often and fits"
    return "use a shorter max_completion_length, LoRA, or let vLLM generate on a card of its own (use_vllm, vllm_mode: server)"


def writing_of(subject: Subject, *, precision: Precision, dtype: str | None) -> Writing | None:
    """None where the config does not say enough."""
    facts = subject.workload.facts
    if facts.layers is None or facts.heads is None or facts.width is None or facts.vocabulary is None:
        return None
    size = facts.head_size or facts.width // facts.heads
    copies = precision in ("bf16", "fp16") and dtype not in _HALF
    embedding = 0 if facts.tied_head else facts.vocabulary * facts.width
    return Writing(
        layers=facts.layers,
        kv_width=(facts.key_value_heads or facts.heads) * size,
        vocabulary=facts.vocabulary,
        copied_weights=max(0, subject.workload.parameters - embedding) if copies else 0,
        number_bytes=2 if dtype in _HALF else 4,
    )


SHARE = "vllm_gpu_memory_utilization"
SLEEP = "vllm_enable_sleep_mode"
MODE = "vllm_mode"
_BUFFERS_BYTES = GIB  # for the activations of vLLM's profiling run: a round figure, not measured
_STEP = 0.05  # shares are proposed in steps of this


@dataclass(frozen=True, kw_only=True, slots=True)
class ColocatedVllm:
    """vLLM on the training's own card."""

    share: float
    share_bytes: int
    sleeps: bool
    tensor_parallel: int = 1
    share_stated: bool = True
    mode_stated: bool = True

    @property
    def assumed(self) -> tuple[Assumption, ...]:
        """Where it runs and what it takes, TRL's defaults where the config does not say."""
        return (
            Assumption(what="vLLM", value="on the training's card", guessed=not self.mode_stated, settle=MODE),
            Assumption(what="vLLM's share", value=f"{self.share:g}", guessed=not self.share_stated, settle=SHARE),
        )

    @property
    def resident_bytes(self) -> int:
        """What it holds while the model trains."""
        return 0 if self.sleeps else self.share_bytes


def colocated_vllm(job: TrainJob, gpu: Gpu | None, *, runs_already: bool = False) -> ColocatedVllm | None:
    """None where vLLM takes nothing of this card, or has taken its part before the card was looked at (`runs_already`)."""
    rollout = job.settings.rollout
    if job.trainer not in GENERATING or not rollout.uses_vllm or gpu is None or runs_already:
        return None
    if rollout.vllm_mode != "colocate":
        return None
    share = rollout.vllm_share
    if not 0 < share <= 1:
        raise ConfigError(f"{SHARE} {share:g} is no share of the card", hint="give a number above 0 and at most 1; 0.3 is TRL's default")
    return ColocatedVllm(
        share=share,
        share_bytes=int(share * (gpu.usable_bytes or gpu.memory_bytes)),
        sleeps=rollout.vllm_sleeps,
        tensor_parallel=rollout.vllm_tensor_parallel,
        share_stated=rollout.states_vllm_share,
        mode_stated=rollout.states_vllm_mode,
    )


def room_beside(vllm: ColocatedVllm | None, budget_bytes: int, gpu: Gpu | None) -> int:
    """What of the budget training may use; NothingFits where the share leaves nothing."""
    if vllm is None or gpu is None:
        return budget_bytes
    left = budget_bytes - vllm.resident_bytes
    if left < GIB // 2:
        raise NothingFits(
            f"nothing fits: colocated vLLM takes {format_bytes(vllm.share_bytes)} of {gpu.name} ({SHARE}: {vllm.share:g}), which leaves "
            f"{format_bytes(max(0, left))} for training",
            hint=f"lower {SHARE}, set {SLEEP}: true so that vLLM gives its memory back while the model trains, or {MODE}: server",
        )
    return left


def held_words(vllm: ColocatedVllm) -> str:
    """What it takes of the card, and when."""
    size = f"{format_bytes(vllm.share_bytes)} of the card ({SHARE}: {vllm.share:g}{'' if vllm.share_stated else ', the default'})"
    if vllm.sleeps:
        return f"colocated vLLM takes {size} while it generates and gives it back while the model trains ({SLEEP})"
    return f"colocated vLLM holds {size}: training has what it leaves"


def advice_when_short(vllm: ColocatedVllm, subject: Subject, *, needed_bytes: int, budget_bytes: int) -> Iterator[str]:
    """What of vLLM's settings would make room for a training of `needed_bytes` that does not fit into the budget beside it."""
    room, whole = budget_bytes + vllm.resident_bytes, vllm.share_bytes / vllm.share
    if vllm.sleeps or needed_bytes > room:
        return
    share = _down((room - needed_bytes) / whole)
    if share * whole >= _vllm_weights(vllm, subject) + _BUFFERS_BYTES:
        yield f"a smaller share for vLLM: leaves {format_bytes(room - int(share * whole))} for training ({SHARE}: {share:g})"
    yield f"vLLM asleep while the model trains: leaves {format_bytes(room)} for training ({SLEEP}: true)"
    yield f"vLLM on another card: leaves {format_bytes(room)} for training ({MODE}: server)"


def phases(vllm: ColocatedVllm, subject: Subject, peak: MemoryPeak) -> tuple[MemoryPhase, ...]:
    """Generate, synchronise, score and train, in the order of a step; () where the parts of the peak are not known."""
    parts = peak.breakdown
    if parts is None:
        return ()
    stays = parts.weights_bytes + parts.optimizer_bytes + peak.context_bytes
    weights = min(vllm.share_bytes, _vllm_weights(vllm, subject))
    scoring = min(peak.device_bytes, stays + parts.logits_bytes + parts.temporaries_bytes)
    return (
        MemoryPhase(name="weight sync", training_bytes=stays, vllm_bytes=weights if vllm.sleeps else vllm.share_bytes),
        MemoryPhase(name="generate", training_bytes=stays, vllm_bytes=vllm.share_bytes),
        MemoryPhase(name="score", training_bytes=scoring, vllm_bytes=vllm.resident_bytes),
        MemoryPhase(name="train", training_bytes=peak.device_bytes, vllm_bytes=vllm.resident_bytes),
    )


def _vllm_weights(vllm: ColocatedVllm, subject: Subject) -> int:
    """vLLM loads in 16 bits, whatever the training's weights are in."""
    return 2 * subject.workload.parameters // vllm.tensor_parallel


def check_vllm(
    vllm: ColocatedVllm, subject: Subject, peak: MemoryPeak, *, card_bytes: int, precision: Precision, dtype: str | None
) -> Iterator[str]:
    """What there is to say; NothingFits where vLLM could not start, or a phase would not fit beside the training."""
    weights = _vllm_weights(vllm, subject)
    if weights + _BUFFERS_BYTES > vllm.share_bytes:
        least = _up((weights + _BUFFERS_BYTES) * vllm.share / vllm.share_bytes)
        raise NothingFits(
            f"nothing fits: vLLM's share of {format_bytes(vllm.share_bytes)} ({SHARE}: {vllm.share:g}) does not hold its copy of the "
            f"weights, {format_bytes(weights)}, and what it computes with",
            hint=f"{SHARE}: {least:g} would at the least"
            if least < 1
            else f"vllm_tensor_parallel_size over several cards, or {MODE}: server",
        )
    for phase in phases(vllm, subject, peak):
        if phase.total_bytes > card_bytes:
            raise NothingFits(
                f"nothing fits: in the phase '{phase.name}' vLLM holds {format_bytes(phase.vllm_bytes)} beside the training's "
                f"{format_bytes(phase.training_bytes)}, more than {format_bytes(card_bytes)}",
                hint=f"lower {SHARE}, or use {MODE}: server",
            )
    yield from _proposed_share(vllm, subject, weights, precision=precision, dtype=dtype)


def _proposed_share(vllm: ColocatedVllm, subject: Subject, weights: int, *, precision: Precision, dtype: str | None) -> Iterator[str]:
    """How many completions the share writes at once, and the share that would do where it is larger than that needs."""
    writing, tokens = writing_of(subject, precision=precision, dtype="bfloat16"), subject.workload.shape.length
    if writing is None or tokens is None:
        return
    cached = 2 * writing.layers * writing.kv_width * tokens * 2 // vllm.tensor_parallel
    rows = completions_at_once(subject.job)
    at_once = max(0, (vllm.share_bytes - weights - _BUFFERS_BYTES) // cached)
    yield (
        f"colocated vLLM holds {format_bytes(vllm.share_bytes)}{' while it generates' if vllm.sleeps else ''}: its weights "
        f"{format_bytes(weights)}, and a cache for {at_once} completions of {tokens} tokens at once, of {rows} in a generation batch"
    )
    enough = _up((weights + _BUFFERS_BYTES + rows * cached) * vllm.share / vllm.share_bytes)
    if not vllm.sleeps and enough <= vllm.share - _STEP:
        freed = int((vllm.share - enough) / vllm.share * vllm.share_bytes)
        yield f"{SHARE}: {enough:g} would hold all {rows} at once and leave {format_bytes(freed)} more for training"


def _up(share: float) -> float:
    """To the next step."""
    return round(-(-share // _STEP) * _STEP, 2)


def _down(share: float) -> float:
    return round(share // _STEP * _STEP, 2)
