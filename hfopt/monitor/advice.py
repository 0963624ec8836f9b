"""For each cause the settings to change and what that should gain: the planner's values where there is a plan, else from measured rates.

A gain g means (1 + g) times the samples per second. It is None where nothing measured gives a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from hfopt.schema import Change, RunFacts, Window

_LOADER_KEYS = ("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers")
_BATCH_KEYS = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16", "torch_compile")
_RECOMPUTATION_GAIN = 1 / 3  # checkpointing runs the forward once more: 4 units of work where 3 would do


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingAdvice:
    changes: tuple[Change, ...] = ()
    predicted_gain: float | None = None


NONE = SettingAdvice()
EXPANDABLE_SEGMENTS = SettingAdvice(
    changes=(
        Change(
            key="PYTORCH_CUDA_ALLOC_CONF", before=None, after="expandable_segments:True", reason="segments that grow leave no gaps behind"
        ),
    )
)


def _planned(run: RunFacts, keys: tuple[str, ...]) -> SettingAdvice | None:
    """The planner's changes of these keys that the run does not have yet."""
    changes = tuple(change for change in run.planned if change.key in keys and run.args.get(change.key) != change.after)
    return SettingAdvice(changes=changes, predicted_gain=run.planned_gain) if changes else None


def _change(run: RunFacts, key: str, after: Any, reason: str) -> Change:
    return Change(key=key, before=run.args.get(key), after=after, reason=reason)


_WAITING = 0.5  # of a core that a loading process uses: below, it waits for a disk or a network more than it computes
_MOST_PER_CORE = 4  # workers that wait


def more_loader(window: Window, run: RunFacts) -> SettingAdvice:
    """Workers = ceil(loading time / computing time), within the cores; cores that are idle meanwhile are shared by workers that wait.

    Without workers the loading time of a step is its data wait; with k workers that cannot keep up it is k times the whole step.
    """
    if planned := _planned(run, _LOADER_KEYS):
        return planned
    wait_s, train_s = window.phases.data_wait_s / window.steps, window.phases.train_s / window.steps
    compute_s, now = max(train_s - wait_s, 1e-9), int(run.args.get("dataloader_num_workers") or 0)
    loading_s = wait_s if now == 0 else now * train_s
    cores = max(1, int(run.cores))
    busy = window.worker_util if now else None
    waiting = busy is not None and busy < _WAITING and (window.core_wait or 0.0) < _WAITING
    room = max(cores, min(int(cores / max(busy or 1.0, 0.01)), _MOST_PER_CORE * cores)) if waiting else cores
    workers = min(max(ceil(loading_s / compute_s), now + 1), room)
    if workers <= now:
        full = f"{now} workers wait already" if waiting else f"all {cores} cores load already"
        reason = f"{full}, so each sample must become cheaper (tokenize beforehand, smaller images, a faster disk)"
        return SettingAdvice(changes=(Change(key="dataset", before=None, after="preprocessed", reason=reason),))
    gain = train_s / max(compute_s, loading_s / workers) - 1
    there = f"a worker keeps {100 * (busy or 0.0):.0f} % of a core busy and otherwise waits" if waiting else f"{cores} cores are there"
    reason = f"loading takes {loading_s / compute_s:.1f} times as long as computing; {there}"
    changes = [_change(run, "dataloader_num_workers", workers, reason)]
    if not run.args.get("dataloader_persistent_workers"):
        changes.append(_change(run, "dataloader_persistent_workers", True, "workers are not started anew in each epoch"))
    return SettingAdvice(changes=tuple(changes), predicted_gain=round(max(0.0, gain), 2))


_INTERVALS = {"eval_heavy": ("eval_steps", 0.05), "logging_heavy": ("logging_steps", 0.01), "saving_heavy": ("save_steps", 0.02)}


def less_often(cause: str, share: float, run: RunFacts) -> SettingAdvice:
    """The interval at which the share falls to its target: cost per occurrence stays, occurrences become fewer."""
    key, target = _INTERVALS[cause]
    gain = round((1 - target) / (1 - share) - 1, 2) if share < 0.99 else None
    steps = run.args.get(key)
    strategy = run.args.get(key.replace("_steps", "_strategy"))
    if isinstance(steps, int | float) and steps >= 1 and strategy in (None, "steps"):
        factor = (share / (1 - share)) / (target / (1 - target)) if share < 1 else 100.0
        after = _round_up(int(steps) * factor)
        return SettingAdvice(
            changes=(_change(run, key, after, f"at {after} it takes about {100 * target:.0f} % of the time"),), predicted_gain=gain
        )
    if cause == "eval_heavy":
        batch = int(run.args.get("per_device_eval_batch_size") or 8)
        reason = "evaluation keeps no activations, so a larger batch fits; or evaluate on a part of the set"
        return SettingAdvice(changes=(_change(run, "per_device_eval_batch_size", 4 * batch, reason),))
    return SettingAdvice(changes=(_change(run, key.replace("_steps", "_strategy"), "steps", f"with {key} set to fewer occurrences"),))


def _round_up(value: float) -> int:
    """To two leading digits that people write: 37 -> 40, 412 -> 450."""
    magnitude: int = 10 ** max(0, len(str(int(value))) - 1)
    half = max(1, magnitude // 2)
    return ceil(value / half) * half


def less_padding(share: float, fixed_length: bool, run: RunFacts) -> SettingAdvice:
    gain = round(share / (1 - share), 2) if share < 0.99 else None
    if fixed_length:
        change = Change(
            key="padding",
            before="max_length",
            after="longest",
            reason="the tokenizer pads every sample to one length; pad in the collator instead",
        )
        return SettingAdvice(changes=(change,), predicted_gain=gain)
    if "group_by_length" in run.args:
        key, on = "group_by_length", True
    else:
        key, on = "train_sampling_strategy", "group_by_length"  # type: ignore[assignment]
    if run.args.get(key) == on:
        return SettingAdvice(
            changes=(Change(key="packing", before=False, after=True, reason="lengths are grouped already; packing leaves no padding"),),
            predicted_gain=gain,
        )
    return SettingAdvice(changes=(_change(run, key, on, "samples of like length share a batch"),), predicted_gain=gain)


def less_memory(run: RunFacts) -> SettingAdvice:
    if planned := _planned(run, _BATCH_KEYS):
        return planned
    batch, accumulation = _pair(run)
    divisor = None if run.keeps_accumulation else next((d for d in range(2, batch + 1) if batch % d == 0), None)
    if divisor is None:
        why = "another accumulation would change the gradients" if run.keeps_accumulation else "the batch is 1 already"
        return SettingAdvice(changes=(_change(run, "gradient_checkpointing", True, f"{why}; recomputing saves the activations"),))
    return SettingAdvice(changes=_trade(run, batch // divisor, accumulation * divisor, "the same effective batch in less memory"))


def use_memory(used_share: float, run: RunFacts, *, launch_bound: bool) -> SettingAdvice | None:
    """None: more memory would buy nothing at the same effective batch."""
    if planned := _planned(run, _BATCH_KEYS):
        return planned
    batch, accumulation = _pair(run)
    factor = max((d for d in range(1, accumulation + 1) if accumulation % d == 0 and d * used_share <= 0.9), default=1)
    if factor > 1 and not run.keeps_accumulation:
        reason = f"the same effective batch; {100 * factor * used_share:.0f} % of the card even if all memory grew with the batch"
        return SettingAdvice(changes=_trade(run, batch * factor, accumulation // factor, reason))
    if run.args.get("gradient_checkpointing"):
        change = _change(run, "gradient_checkpointing", False, "there is room for the activations: no need to compute them twice")
        return SettingAdvice(changes=(change,), predicted_gain=round(_RECOMPUTATION_GAIN, 2))
    if launch_bound:
        change = _change(
            run,
            "per_device_train_batch_size",
            2 * batch,
            "larger kernels at the same launch cost; changes the effective batch, so it is yours to decide",
        )
        return SettingAdvice(changes=(change,))
    return None


def larger_kernels(window: Window, run: RunFacts) -> SettingAdvice:
    """With accumulation, one piece instead of many: the launch cost of a step falls by that factor while launching is all there is."""
    if planned := _planned(run, _BATCH_KEYS):
        return planned
    batch, accumulation = _pair(run)
    if accumulation > 1 and not run.keeps_accumulation:
        factor = max(d for d in range(2, accumulation + 1) if accumulation % d == 0 and d <= 8) if accumulation % 2 == 0 else accumulation
        compute_s = window.phases.forward_backward_s
        gain = window.phases.train_s / max(1e-9, window.phases.train_s - compute_s * (1 - 1 / factor)) - 1
        changes = _trade(run, batch * factor, accumulation // factor, "fewer and larger kernels, the same effective batch")
        return SettingAdvice(changes=changes, predicted_gain=round(gain, 2))
    if not run.args.get("torch_compile") and run.device == "cuda":
        return SettingAdvice(changes=(_change(run, "torch_compile", True, "fuses small kernels; costs compile time at the start"),))
    reason = "larger kernels at the same launch cost; changes the effective batch, so it is yours to decide"
    return SettingAdvice(changes=(_change(run, "per_device_train_batch_size", 2 * batch, reason),))


def less_traffic(run: RunFacts) -> SettingAdvice:
    _batch, accumulation = _pair(run)
    if run.args.get("deepspeed") or run.args.get("fsdp"):
        change = _change(
            run, "deepspeed" if run.args.get("deepspeed") else "fsdp", None, "keep optimizer state and weights on the card if they fit"
        )
        return SettingAdvice(changes=(change,))
    if not run.args.get("dataloader_pin_memory", True):
        return SettingAdvice(changes=(_change(run, "dataloader_pin_memory", True, "pinned memory is copied at the link's full speed"),))
    return SettingAdvice(
        changes=(_change(run, "gradient_accumulation_steps", 2 * accumulation, "fewer exchanges per sample; changes the effective batch"),)
    )


def _pair(run: RunFacts) -> tuple[int, int]:
    return int(run.args.get("per_device_train_batch_size") or 1), int(run.args.get("gradient_accumulation_steps") or 1)


def _trade(run: RunFacts, batch: int, accumulation: int, reason: str) -> tuple[Change, ...]:
    """A run does not show whether its loss is divided by the accumulation; with many classification heads it is not."""
    reason += "; `hfopt plan` checks that this model's gradients stay the same"
    return (
        _change(run, "per_device_train_batch_size", batch, reason),
        _change(run, "gradient_accumulation_steps", accumulation, reason),
    )
