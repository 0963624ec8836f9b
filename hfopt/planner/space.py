"""The search space: every way to make the same effective batch, in every precision the card and the model allow.

Which precisions may be tried on a card for a model, and why the others may not. bf16 and tf32 need compute capability 8.0. fp16 pays on
7.x, where tensor cores know nothing else; before that it only saves memory, and from 8.0 on bf16 is as fast and cannot overflow, so fp16
stays only where the user already has it. What the user has is always tried.

The effective batch is a law: per-device batch × accumulation × world is the same for every candidate, so only exact divisors appear.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hfopt.errors import ConfigError
from hfopt.schema import Candidate, Checkpointing, Gpu, Precision
from hfopt.units import divisors

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
    if current == "fp16" and facts.gradients_in in _UNSCALABLE:
        return _instead_of_fp16(gpu, facts, keep=keep)
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


_UNSCALABLE = {
    "bfloat16": "PyTorch has no kernel to unscale bfloat16 gradients (NotImplementedError at the first step)",
    "float16": "PyTorch refuses to unscale float16 gradients (ValueError at the first step)",
}
"""Types of gradients that a GradScaler cannot take: torch/amp/grad_scaler.py and _amp_foreach_non_finite_check_and_unscale_."""


def _instead_of_fp16(gpu: Gpu | None, facts: NumericFacts, *, keep: bool) -> Precisions:
    """bf16 where the device has it, else the weights' own type without autocast."""
    stored = str(facts.gradients_in)
    fault = f"fp16: true cannot train weights stored in {stored}: {_UNSCALABLE[stored]}"
    if keep:
        raise ConfigError(f"{fault}, and it is to be kept", hint="do not keep fp16, or load the model in float32 (dtype: float32)")
    instead: Precision = "bf16" if stored == "bfloat16" and (gpu is None or gpu.supports("bf16")) else "fp32"
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
