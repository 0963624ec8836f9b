"""From the chosen candidate to the keys of the YAML: only what changes something, each change with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hfopt.schema import Candidate, Change, Chosen, LoaderPlan
from hfopt.units import format_bytes, format_rate, format_seconds

PYTORCH_PREFETCH = 2  # torch.utils.data.DataLoader with workers, when nothing is said

LIGER_REASON = (
    "head and loss in slices, so the logits never exist whole, and norms, rotary embedding and gated units that keep less; allowed by "
    "--allow use_liger_kernel. The memory follows liger-kernel's rules, the time is that of plain operations of the same size"
)
ATTENTION_REASONS = {
    "sdpa": "the same attention without the matrix of scores in memory, allowed by --allow attn_implementation",
    "flash_attention_2": "cuts the padding out and keeps no matrix of scores, allowed by --allow attn_implementation. An estimate: priced "
    "as PyTorch's own flash kernel",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What the arguments were: those the file sets, the defaults in force for the others, and the keys that stay."""

    args: Mapping[str, Any]
    defaults: Mapping[str, Any]
    kept: frozenset[str]

    def value(self, key: str) -> Any:
        return self.args[key] if self.args.get(key) is not None else self.defaults.get(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Before and after, and the figures the reasons quote."""

    before: Chosen
    after: Chosen
    effective_batch: int
    budget_bytes: int
    device: str
    further: tuple[tuple[str, int, str], ...] = ()  # keys of generation and evaluation, each with its value and reason
    learning_rate: tuple[float, str] | None = None
    compiling: str | None = None  # why it is compiled, where the config is not
    ruled_out: str | None = None  # why the config's precision cannot stay


def changes(setting: Setting, outcome: Outcome) -> tuple[Change, ...]:
    """In the order a reader of the config expects: batch, precision, checkpointing, evaluation, loader."""
    wanted = [*_batch(outcome), *_precision(setting, outcome), *_checkpointing(setting, outcome), *_others(outcome), *_loader(outcome)]
    return tuple(
        Change(key=key, before=setting.value(key), after=after, reason=reason)
        for key, after, reason in wanted
        if key not in setting.kept and not _same(setting, key, after)
    )


def _same(setting: Setting, key: str, after: Any) -> bool:
    if after is None:
        return setting.args.get(key) is None
    return bool(setting.value(key) == after)


Wanted = tuple[str, Any, str]


def _batch(outcome: Outcome) -> Iterator[Wanted]:
    before, after = outcome.before, outcome.after
    chosen, was = after.candidate, before.candidate
    rate, old_rate = format_rate(after.time.samples_per_s, "samples"), format_rate(before.time.samples_per_s, "samples")
    peak = f"{format_bytes(after.memory.device_bytes)} of {format_bytes(outcome.budget_bytes)} usable on {outcome.device}"
    if not before.fits and before.evaluation is None:
        why = f"{was.per_device_batch} does not fit ({format_bytes(before.memory.device_bytes)}); this takes {peak}"
    else:
        why = f"{rate} predicted{f' instead of {old_rate}' if before.runs else ''}; takes {peak}"
    yield "per_device_train_batch_size", chosen.per_device_batch, why
    factors = f"{chosen.per_device_batch} per device × {chosen.accumulation}"
    yield "gradient_accumulation_steps", chosen.accumulation, f"keeps the effective batch at {outcome.effective_batch}: {factors}"


def _precision(setting: Setting, outcome: Outcome) -> Iterator[Wanted]:
    chosen, was = outcome.after.candidate.precision, outcome.before.candidate.precision
    if chosen == was:
        return
    fault = outcome.before.fault
    why = (
        fault
        or {
            "bf16": f"tensor cores of {outcome.device} at full rate, half the activation memory, the range of float32",
            "fp16": f"the tensor cores of {outcome.device} support fp16 only; with loss scaling",
            "tf32": f"float32 matmuls on the tensor cores of {outcome.device}; weights and activations stay float32",
            "fp32": outcome.ruled_out or f"float32 is predicted faster here: the casts of {was} take longer than its kernels save",
        }[chosen]
    )
    for name in ("fp16", "bf16", "tf32"):
        if name == chosen:
            yield name, True, why
        elif setting.args.get(name) is True and not (name == "tf32" and chosen in ("bf16", "fp16")):
            yield name, False, why if chosen == "fp32" else f"{chosen} replaces it"


def _checkpointing(setting: Setting, outcome: Outcome) -> Iterator[Wanted]:
    chosen, was = outcome.after.candidate.checkpointing, outcome.before.candidate.checkpointing
    config = setting.args.get("fsdp_config")
    if chosen.every_n_layers == 1 and isinstance(config, Mapping) and config.get("activation_checkpointing") is True:
        yield "gradient_checkpointing", False, "the fsdp_config's activation_checkpointing does it; transformers refuses both together"
        if "gradient_checkpointing_kwargs" in setting.args:
            yield "gradient_checkpointing_kwargs", None, "without gradient_checkpointing it says nothing"
        return
    if chosen == was:
        return
    if not chosen.on:
        yield "gradient_checkpointing", False, "everything fits without it, and recomputing the forward costs time"
        if "gradient_checkpointing_kwargs" in setting.args:
            yield "gradient_checkpointing_kwargs", None, "without checkpointing it says nothing"
        return
    yield "gradient_checkpointing", True, f"recomputing {chosen.which_layers} costs less time than the smaller batch it saves from"
    options: dict[str, Any] = {"use_reentrant": chosen.use_reentrant}
    if chosen.every_n_layers > 1:
        options["every_n_layers"] = chosen.every_n_layers
    why = "what the prediction rests on"
    if was.on:
        rate, old_rate = (format_rate(one.time.samples_per_s, "samples") for one in (outcome.after, outcome.before))
        peak = f"{format_bytes(outcome.after.memory.device_bytes)} of {format_bytes(outcome.budget_bytes)} usable on {outcome.device}"
        why = f"recomputing {chosen.which_layers} instead of {was.which_layers}: {rate} predicted instead of {old_rate}; takes {peak}"
    yield "gradient_checkpointing_kwargs", options, why


def _others(outcome: Outcome) -> Iterator[Wanted]:
    chosen: Candidate = outcome.after.candidate
    if chosen.optim is not None:
        yield "optim", chosen.optim, "the same update in fewer kernels, allowed by --allow optim"
    if chosen.torch_compile and outcome.compiling is not None:
        yield "torch_compile", True, outcome.compiling
    if chosen.use_liger_kernel:
        yield "use_liger_kernel", True, LIGER_REASON
    if chosen.attn_implementation is not None:
        yield "attn_implementation", chosen.attn_implementation, ATTENTION_REASONS[chosen.attn_implementation]
    if outcome.learning_rate is not None:
        yield "learning_rate", *outcome.learning_rate
    yield from outcome.further


def _loader(outcome: Outcome) -> Iterator[Wanted]:
    was, plan = outcome.before.loader, outcome.after.loader
    if _feeds_alike(was, plan):
        return
    yield "dataloader_num_workers", plan.workers, plan.reason
    if plan.workers == 0:
        yield "dataloader_prefetch_factor", None, "needs workers; PyTorch refuses it without"
        yield "dataloader_persistent_workers", False, "there are no workers to keep"
    else:
        if (was.prefetch_factor or PYTORCH_PREFETCH) != plan.prefetch_factor:
            why = f"batches each worker keeps ready: a sample costs {format_seconds(plan.sample_s)}, and the cost varies"
            yield "dataloader_prefetch_factor", plan.prefetch_factor, why
        yield "dataloader_persistent_workers", plan.persistent_workers, "workers are not started again for every epoch"
    yield "dataloader_pin_memory", plan.pin_memory, "copies to the card do not block" if plan.pin_memory else "there is no card to copy to"


def _feeds_alike(was: LoaderPlan, plan: LoaderPlan) -> bool:
    return (was.workers, was.prefetch_factor, was.pin_memory, was.persistent_workers) == (
        plan.workers,
        plan.prefetch_factor,
        plan.pin_memory,
        plan.persistent_workers,
    )
