"""Colocated vLLM beside GRPO's and RLOO's training: the share of the card it takes, when it holds it, and a map of the phases.

TRL starts vLLM in the training process (`vllm_mode: colocate`) and hands it `vllm_gpu_memory_utilization` of the card's whole memory, for
its own copy of the weights and its key-value cache. Without sleep mode the share is gone for good. With `vllm_enable_sleep_mode` TRL puts
it to sleep at level 2 (trl/generation/vllm_generation.py): weights and cache are dropped while the model scores and trains, the weights are
taken again when they are synchronised, the cache when completions are written. A server (`vllm_mode: server`) takes nothing here.

Known limits: what a sleeping vLLM keeps (CUDA graphs, buffers outside of its pool) is not known and not counted, and one completion is
taken to be as long as the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hfopt.errors import ConfigError, NothingFits
from hfopt.planner.grpo import completions_at_once, writing_of
from hfopt.planner.request import Subject
from hfopt.schema import GENERATING, Assumption, Gpu, MemoryPeak, MemoryPhase, Precision, TrainJob
from hfopt.units import GIB, format_bytes

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


# ------------------------------------------------------------------------------------------------- the phases


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
