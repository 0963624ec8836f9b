"""The search: every way to make the same effective batch, which of them fit, and which of those is fastest.

The effective batch is a law: per-device batch × accumulation × world is the same for every candidate, so only exact divisors appear.
Which precisions may be tried on a card for a model, and why the others may not: bf16 and tf32 need compute capability 8.0. fp16 pays on
7.x, where tensor cores know nothing else; before that it only saves memory, and from 8.0 on bf16 is as fast and cannot overflow, so fp16
stays only where the user already has it. What the user has is always tried.

The order of the candidates: predicted time per effective batch; where two are as good as equal (within `TIE`: no roofline is finer), the
one that risks less. Among equals: the config's own settings, for a change is made for a gain; else its own batch, for a larger one takes
memory; else fewer accumulation steps, no checkpointing, the checkpointing and the precision the user has.

Best-first, so that only what could win is traced: a candidate waits in a heap under a lower bound of its step time. At the front it is
priced exactly (which may cost a trace) and goes back; at the front again it is compared with its settings' largest batch. What surely does
not fit is never priced. The first that fits is the best; everything whose bound lies above it, ties included, is left unpriced. With true
bounds the answer is that of an exhaustive search. What a batch reserves does not always grow with it, so that the winner is asked once
more, for its own batch; one that does not fit is left out and the search made again, with all prices at hand.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from hfopt.errors import ConfigError
from hfopt.schema import Candidate, Checkpointing, Gpu, Precision, Rejection, StepTime, TimeModel, why_not_scaled
from hfopt.units import divisors, format_bytes

OVERFLOWS_IN_FP16 = ("t5", "mt5", "umt5", "longt5", "byt5", "pix2struct", "gemma", "pegasus")
"""Families whose activations leave fp16's range (trained in bfloat16 on TPUs): the loss becomes NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precisions:
    allowed: tuple[Precision, ...]
    ruled_out: tuple[tuple[Precision, str], ...]
    warnings: tuple[str, ...] = ()
    fault: str | None = None  # why the config's own precision cannot train at all


@dataclass(frozen=True, kw_only=True, slots=True)
class NumericFacts:
    """What is known of the model's numbers. `family` is the model class or name in any case."""

    family: str
    weights_dtype: str | None = None  # what the weights are stored in during training; None is float32
    trained_in: str | None = None  # what the published weights were trained in
    gradients_in: str | None = None  # the type of the gradients that a GradScaler would see; None is float32


def precisions(gpu: Gpu | None, current: Precision, facts: NumericFacts, *, keep: bool = False) -> Precisions:
    """The precisions to try, the user's own first."""
    if current == "fp16" and (fault := why_not_scaled(facts.gradients_in)) is not None:
        return _instead_of_fp16(gpu, facts, fault, keep=keep)
    if gpu is None:
        return _on_cpu(current, keep=keep)
    if keep:
        return Precisions(allowed=(current,), ruled_out=(), warnings=_fp16_warnings((current,), facts))
    if facts.weights_dtype in ("bfloat16", "float16"):
        reason = f"the weights are stored in {facts.weights_dtype}: autocast on top only adds casts"
        others: tuple[Precision, ...] = ("fp16", "bf16", "tf32")
        return Precisions(allowed=(current,), ruled_out=tuple((p, reason) for p in others if p != current))
    allowed: list[Precision] = [current]
    ruled_out: list[tuple[Precision, str]] = []
    for precision in ("bf16", "tf32", "fp16", "fp32"):
        why_not = _why_not(precision, gpu, current, facts)
        if why_not is None and precision not in allowed:
            allowed.append(precision)
        elif why_not is not None and precision != current:
            ruled_out.append((precision, why_not))
    if current == "fp16" and _overflows(facts):
        allowed.remove("fp16")
        ruled_out.append(("fp16", f"{facts.family} overflows in fp16"))
    if not gpu.supports(current):
        allowed.remove(current)
        ruled_out.append((current, f"{gpu.name} has no {current}: it needs compute capability 8.0"))
    return Precisions(allowed=tuple(allowed), ruled_out=tuple(ruled_out), warnings=_fp16_warnings(allowed, facts))


def _on_cpu(current: Precision, *, keep: bool) -> Precisions:
    """The user's own, except fp16: accelerate (accelerator.py) gives it neither autocast nor a GradScaler there."""
    if current != "fp16":
        return Precisions(allowed=(current,), ruled_out=())
    why = "a CPU has no fp16 arithmetic: a step takes minutes, or accelerate switches fp16 off"
    if keep:
        return Precisions(allowed=(current,), ruled_out=(), warnings=(f"fp16 was asked to stay, but {why}",))
    return Precisions(allowed=("fp32",), ruled_out=(("fp16", why),))


def _instead_of_fp16(gpu: Gpu | None, facts: NumericFacts, fault: str, *, keep: bool) -> Precisions:
    """bf16 where the device has it, else bfloat16's own type without autocast. Weights in float16 train with neither: alone their small
    gradients vanish, and there is no loss scaling."""
    stored = facts.gradients_in
    if stored == "float16":
        raise ConfigError(fault, hint="load the model in float32 (dtype: float32), or train an adapter (LoRA)")
    if keep:
        raise ConfigError(f"{fault}, and it is to be kept", hint="do not keep fp16, or load the model in float32 (dtype: float32)")
    instead: Precision = "bf16" if gpu is None or gpu.supports("bf16") else "fp32"
    others: tuple[Precision, ...] = ("fp16", "bf16", "tf32", "fp32")
    ruled_out = tuple((other, fault if other == "fp16" else f"the weights are stored in {stored}") for other in others if other != instead)
    return Precisions(allowed=(instead,), ruled_out=ruled_out, fault=fault)


def _why_not(precision: Precision, gpu: Gpu, current: Precision, facts: NumericFacts) -> str | None:
    capability = gpu.capability
    if precision in ("bf16", "tf32") and not gpu.supports(precision):
        have = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        return f"needs compute capability 8.0, {gpu.name} has {have}"
    if precision == "fp16":
        if _overflows(facts):
            return f"{facts.family} overflows in fp16"
        if capability is None or capability < (7, 0):
            return f"{gpu.name} has no fp16 tensor cores: it would only slow the step"
        if gpu.supports("bf16") and current != "fp16":
            return "bf16 is as fast on this card and cannot overflow"
    return None


def _overflows(facts: NumericFacts) -> bool:
    family = facts.family.lower().replace("-", "").replace("_", "")
    return any(name in family for name in OVERFLOWS_IN_FP16)


def _fp16_warnings(tried: Sequence[Precision], facts: NumericFacts) -> tuple[str, ...]:
    used = "fp16" in tried
    if used and _overflows(facts):
        return (f"{facts.family} is known to overflow in fp16: watch for a NaN loss",)
    if used and facts.trained_in == "bfloat16":
        return (
            "the published weights were trained in bfloat16, whose range fp16 does not have: watch the loss, and the GradScaler's scale",
        )
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What may be chosen. A pinned value is the user's and the only one tried; `batch_multiple` and
    `batch_divides` are what the trainer demands of a batch."""

    effective_batch: int
    world_size: int
    precisions: tuple[Precision, ...]
    checkpointings: tuple[Checkpointing, ...]
    batch: int | None = None
    accumulation: int | None = None
    batch_multiple: int = 1
    batch_divides: int | None = None
    optims: tuple[str | None, ...] = (None,)
    attention: tuple[str | None, ...] = (None,)
    compiled: tuple[bool, ...] = (False,)
    liger: tuple[bool, ...] = (False,)


def micro_batches(space: Space) -> tuple[int, ...]:
    """The per-device batches that keep the effective batch, largest first."""
    if space.effective_batch % space.world_size:
        raise ConfigError(
            f"the effective batch {space.effective_batch} cannot be shared by {space.world_size} devices",
            hint=f"Use {_nearest_counts(space)} devices, or ask for another effective batch with --effective-batch.",
        )
    per_device = space.effective_batch // space.world_size
    return tuple(
        batch
        for batch in reversed(divisors(per_device))
        if space.batch in (None, batch)
        and space.accumulation in (None, per_device // batch)
        and (batch * space.world_size) % space.batch_multiple == 0
        and (space.batch_divides is None or space.batch_divides % batch == 0)
    )


def candidates(space: Space) -> tuple[Candidate, ...]:
    """Every point of the space; the product is small because only divisors count."""
    batches = micro_batches(space)
    if not batches:
        raise ConfigError(
            f"no batch size keeps the effective batch {space.effective_batch} on {space.world_size} device(s) and what was asked to stay",
            hint="Leave per_device_train_batch_size or gradient_accumulation_steps free, or ask for another --effective-batch.",
        )
    per_device = space.effective_batch // space.world_size
    return tuple(
        Candidate(
            per_device_batch=batch,
            accumulation=per_device // batch,
            precision=precision,
            checkpointing=checkpointing,
            optim=optim,
            attn_implementation=attention,
            torch_compile=compiled,
            use_liger_kernel=liger,
        )
        for precision in space.precisions
        for checkpointing in space.checkpointings
        for optim in space.optims
        for attention in space.attention
        for compiled in space.compiled
        for liger in space.liger
        for batch in batches
    )


def checkpointing_choices(current: Checkpointing, *, possible: bool, graded: bool, layers: int | None) -> tuple[Checkpointing, ...]:
    """None, each second layer where the installed transformers can do it, and full; the reentrant mode is the user's."""
    if not possible:
        return (Checkpointing(),)
    steps = [0, 1]
    if graded and layers is not None and layers >= 4:
        steps.insert(1, 2)
    found = [Checkpointing(every_n_layers=n, use_reentrant=current.use_reentrant if n else False) for n in steps]
    return tuple(_unique([*found, current]))


def _unique(items: Iterable[Checkpointing]) -> list[Checkpointing]:
    return list(dict.fromkeys(items))


def _nearest_counts(space: Space) -> str:
    counts: Sequence[int] = [d for d in divisors(space.effective_batch) if d <= 2 * space.world_size]
    return " or ".join(str(count) for count in counts[-2:])


TIE = 0.02  # ratios between settings are met to 3 % in the median (benchmarks/speed_accuracy.py): less than that decides nothing


def rank(candidates: Iterable[Candidate], time: TimeModel, *, current: Candidate | None = None) -> tuple[tuple[Candidate, StepTime], ...]:
    """Fastest first. All candidates share the effective batch, so the time of their optimizer step compares them."""
    priced = sorted(
        ((candidate, time(candidate)) for candidate in candidates), key=lambda pair: (pair[1].step_s, _preference(pair[0], current))
    )
    ordered: list[tuple[Candidate, StepTime]] = []
    start = 0
    while start < len(priced):
        end = start
        while end < len(priced) and priced[end][1].step_s <= priced[start][1].step_s * (1 + TIE):
            end += 1
        ordered.extend(sorted(priced[start:end], key=lambda pair: _preference(pair[0], current)))
        start = end
    return tuple(ordered)


def _preference(candidate: Candidate, current: Candidate | None) -> tuple[object, ...]:
    extras: Sequence[bool] = (
        candidate.torch_compile,
        candidate.use_liger_kernel,
        candidate.optim is not None,
        candidate.attn_implementation is not None,
    )
    return (
        candidate != current,  # a change is made for a gain
        sum(extras),
        current is not None and candidate.per_device_batch != current.per_device_batch,  # so is a larger batch, with the memory it takes
        candidate.accumulation,
        candidate.checkpointing.on,
        current is not None and candidate.checkpointing != current.checkpointing,
        current is not None and candidate.precision != current.precision,
        candidate.checkpointing.every_n_layers,
        candidate.precision,
    )


LargestBatch = Callable[[Candidate], int | None]
"""The largest per-device batch that fits with this candidate's other settings; None when not even one sample does."""


def split(
    candidates: Iterable[Candidate], largest_batch: LargestBatch, budget_bytes: int
) -> tuple[tuple[Candidate, ...], tuple[Rejection, ...]]:
    """The candidates that fit, and the others with the reason. Order is kept."""
    fitting: list[Candidate] = []
    rejected: list[Rejection] = []
    for candidate in candidates:
        limit = largest_batch(candidate)
        if limit is not None and candidate.per_device_batch <= limit:
            fitting.append(candidate)
        else:
            rejected.append(Rejection(candidate=candidate, reason=_reason(candidate, limit, budget_bytes)))
    return tuple(fitting), tuple(rejected)


def _reason(candidate: Candidate, limit: int | None, budget_bytes: int) -> str:
    budget = format_bytes(budget_bytes)
    if limit is None:
        return f"not even one sample fits into {budget}"
    return f"batch {candidate.per_device_batch} does not fit into {budget}: at most {limit} with these settings"


def bound_reason(candidate: Candidate, at_most: int, budget_bytes: int) -> str:
    """For one that was not traced, above a bound that no batch passes: less may be too much as well."""
    if not at_most:
        return _reason(candidate, None, budget_bytes)
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at most {at_most}, perhaps fewer"


def hole_reason(candidate: Candidate, budget_bytes: int) -> str:
    """For one that its settings' largest batch would let in."""
    return f"batch {candidate.per_device_batch} does not fit into {format_bytes(budget_bytes)}: at this batch more is kept in the cache"


class Models(Protocol):
    """What the search asks of the estimates."""

    def bound_s(self, candidate: Candidate) -> float:
        """No step of this candidate is faster; cheap."""

    def time(self, candidate: Candidate) -> StepTime:
        """The exact prediction; may trace."""

    def largest_batch(self, candidate: Candidate) -> int | None:
        """The largest batch that fits with its settings; may trace."""

    def fits(self, candidate: Candidate) -> bool:
        """Does it fit at its very batch? May trace."""

    def known(self, candidate: Candidate) -> bool:
        """Both answers are at hand without a trace."""

    def known_limit(self, candidate: Candidate) -> int | None:
        """Like largest_batch but never traces, and may be too small."""

    def at_most(self, candidate: Candidate) -> int | None:
        """No batch above this fits, 0 included; None: not known. Never traces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    ranked: tuple[tuple[Candidate, StepTime], ...]  # the candidates that fit, best first; () when nothing does
    rejected: tuple[Rejection, ...]


def best_first(candidates: Sequence[Candidate], models: Models, budget_bytes: int, *, current: Candidate | None = None) -> SearchResult:
    """The candidates that fit in their order, and the others with their reasons."""
    left_out: list[Rejection] = []
    while True:
        out = {one.candidate for one in left_out}
        found = _searched([one for one in candidates if one not in out], models, budget_bytes, current)
        if not found.ranked or models.fits(winner := found.ranked[0][0]):
            return replace(found, rejected=(*left_out, *found.rejected))
        left_out.append(Rejection(candidate=winner, reason=hole_reason(winner, budget_bytes)))


def _searched(candidates: Sequence[Candidate], models: Models, budget_bytes: int, current: Candidate | None) -> SearchResult:
    heap = [(models.bound_s(candidate), False, index) for index, candidate in enumerate(candidates)]
    heapq.heapify(heap)
    fitting: dict[Candidate, StepTime] = {}
    rejected: list[Rejection] = []
    best_s = float("inf")
    left: list[tuple[float, int]] = []
    while heap:
        seconds, exact, index = heapq.heappop(heap)
        candidate = candidates[index]
        if seconds > best_s * (1 + TIE):
            left.append((seconds, index))
            continue
        at_most = models.at_most(candidate)
        if at_most is not None and at_most < candidate.per_device_batch:
            rejected.append(Rejection(candidate=candidate, reason=bound_reason(candidate, at_most, budget_bytes)))
            continue
        if not exact:
            tighter = models.bound_s(candidate)
            if tighter > seconds:
                heapq.heappush(heap, (tighter, False, index))
            else:
                heapq.heappush(heap, (models.time(candidate).step_s, True, index))
            continue
        kept, refused = split([candidate], models.largest_batch, budget_bytes)
        rejected.extend(refused)
        if kept:
            fitting[candidate] = models.time(candidate)
            best_s = min(best_s, seconds)
    _add_the_rest(left, candidates, models, budget_bytes, best_s, fitting, rejected)
    return SearchResult(ranked=rank(fitting, fitting.__getitem__, current=current), rejected=tuple(rejected))


def _add_the_rest(
    left: Sequence[tuple[float, int]],
    candidates: Sequence[Candidate],
    models: Models,
    budget_bytes: int,
    best_s: float,
    fitting: dict[Candidate, StepTime],
    rejected: list[Rejection],
) -> None:
    """What cannot win: ranked where the answer is at hand, else named with its bound."""
    for seconds, index in left:
        candidate = candidates[index]
        if models.known(candidate):
            kept, refused = split([candidate], models.known_limit, budget_bytes)
            rejected.extend(refused)
            if kept:
                fitting[candidate] = models.time(candidate)
        else:
            slower = 100 * (seconds / best_s - 1)
            rejected.append(Rejection(candidate=candidate, reason=f"at least {slower:.0f} % slower than the best that fits: not traced"))
