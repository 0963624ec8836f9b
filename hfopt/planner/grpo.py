"""What GRPO and RLOO demand of their batches, and what their generation holds beside the training.

What a trainer demands of its batches, beside their product: GRPO's groups and what it generates at once.

What GRPO's generation holds beside the training, and whether it fits: every completion of a generation batch is written at once.

    cache  = 2 (keys and values) × layers × key-value heads × head size × tokens × completions, in the type of the weights: rotary
             positions leave keys in it under autocast too, and values are joined to what is cached in the type of the keys
    logits = vocabulary × completions × 3 in float32: the last token's logits, scores and probabilities live through the next pass
    copies = what autocast makes of float32 weights, for the length of a forward pass

It lives while nothing of the backward does, so it is held against what stays (weights, optimizer state, the context), not against the
step's peak. No candidate changes it: the generation batch is the user's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hfopt.compat.versions import is_at_least, package_version
from hfopt.config.settings import EVALUATION_BATCH
from hfopt.errors import NothingFits
from hfopt.model.model_facts import facts_of
from hfopt.planner.request import Subject
from hfopt.schema import GENERATING, MemoryPeak, Precision, TrainJob
from hfopt.units import MIB, format_bytes

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
    facts = facts_of(subject.workload)
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
