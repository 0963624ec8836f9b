"""The winner is tried on the device or rehearsed (once, then kept on disk), and what was measured corrects the curve for this job.

Only the virtual GPU's: a real device is measured anew, whatever was measured on it before.

The winner is tried on the device: an out-of-memory error sends the next that needs less; on the CPU measured times decide. On a card one
trial is enough: its speed is well predicted and its memory is what must be sure. On the CPU speeds depend on caches that no roofline knows:
the predicted best and the config's own settings are timed, then the neighbouring batch sizes of whichever is faster, until none of them is.
Other processes disturb: the two fastest, where they are close, are timed once more, and the better run of each counts.

A measured peak above the budget rules the winner out although it ran; one below what was predicted may let a larger batch in, which is
then tried as well.

Where a winner can be tried, and the child that tries it: started as soon as the job is read, it imports while the search goes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from hfopt.compat.versions import missing_kernels, torch_build
from hfopt.errors import NothingFits, VirtualGpuError
from hfopt.facts.argument_effects import stand_in
from hfopt.job.request import Progress
from hfopt.memory.step_memory import context_bytes
from hfopt.model.stored_workload import workload_key
from hfopt.planner.search import SearchResult
from hfopt.pricing.candidate_prices import Pricing
from hfopt.probe.dry_run import Extent, Prepared
from hfopt.schema import (
    REHEARSED_MICRO_BATCHES,
    Candidate,
    Checkpointing,
    Correction,
    EvaluationPeak,
    Gpu,
    Hardware,
    StepTime,
    TrainJob,
    Trial,
)
from hfopt.store import NotPlainError, default_store, from_json, to_json
from hfopt.virtual.environment import available

_KEPT = ("ok", "oom")  # what failed for another reason may not fail again
_UNMEASURED = ("output_dir", "logging_dir", "run_name", "report_to")


Parts = dict[str, Any]


def rehearsal_parts(job: TrainJob | None, gpu: Gpu | None, candidate: Candidate, evaluation: EvaluationPeak | None) -> Parts | None:
    """What a rehearsal rests on; None where it may not be kept."""
    if job is None or gpu is None or default_store() is None or (key := workload_key(job)) is None:
        return None
    try:
        return {
            "what": "rehearsal",
            "workload": key,
            "arguments": {name: to_json(value) for name, value in job.raw.items() if name not in _UNMEASURED},
            "card": to_json(gpu),
            "candidate": to_json(candidate),
            "evaluation": None if evaluation is None else [evaluation.batch, evaluation.accumulation_steps, evaluation.keeps_predictions],
        }
    except NotPlainError:  # a YAML may hold dates
        return None


def kept_rehearsal(parts: Parts | None) -> Trial | None:
    store = default_store()
    found = None if store is None or parts is None else store.get(parts)
    try:
        trial = None if found is None else from_json(found, (Trial, Candidate, Checkpointing))
    except NotPlainError:
        return None
    return trial if isinstance(trial, Trial) and trial.outcome in _KEPT else None


def keep_rehearsal(parts: Parts | None, trial: Trial) -> None:
    store = default_store()
    if store is not None and parts is not None and trial.outcome in _KEPT:
        store.put(parts, to_json(trial), label=f"rehearsals on {parts['card']['Gpu'][0]}")


MOST_FAILURES = 4
MOST_TIMINGS = 7
CLOSE = 0.25  # two processes of the same candidate were seen to differ by so much

Run = Callable[[Candidate], Trial | None]
NeedsBytes = Callable[[Candidate], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """Which of the ranked candidates stands, the trial that says so, and those that ran out of memory."""

    chosen: int | None  # None: each one that was predicted to fit ran out of memory
    trial: Trial | None
    failed: tuple[Trial, ...] = ()
    timed_out: tuple[Trial, ...] = ()
    runs: int = 0


def tried(ranked: Sequence[tuple[Candidate, StepTime]], run: Run, *, needs_bytes: NeedsBytes = lambda c: c.per_device_batch) -> Tried:
    """Walks down the ranking to the first that runs. After an out-of-memory error only what needs less is looked at."""
    failed: list[Trial] = []
    for index, (candidate, _) in enumerate(ranked):
        if failed and needs_bytes(candidate) >= needs_bytes(failed[-1].candidate):
            continue
        if len(failed) >= MOST_FAILURES:
            break
        trial = run(candidate)
        if trial is None:
            return Tried(chosen=index if failed else 0, trial=failed[-1] if failed else None, failed=tuple(failed), runs=len(failed))
        if trial.outcome != "oom":
            return Tried(chosen=index, trial=trial, failed=tuple(failed), runs=len(failed) + 1)
        failed.append(trial)
    return Tried(chosen=_untried(ranked, failed, needs_bytes), trial=failed[-1], failed=tuple(failed), runs=len(failed))


def timed(ranked: Sequence[tuple[Candidate, StepTime]], run: Run, own: Candidate) -> Tried:
    """The fastest measured, from the first of the ranking and the config's own settings on; a trial that fails counts as a run too.
    A trial out of time is the last: the others would take as long. Where none was measured, the config's own settings stay."""
    places = {candidate: index for index, (candidate, _) in enumerate(ranked)}
    found: dict[Candidate, Trial] = {}
    waiting = list(dict.fromkeys((ranked[0][0], own if own in places else ranked[0][0])))
    while waiting and len(found) < MOST_TIMINGS:
        candidate = waiting.pop(0)
        trial = run(candidate)
        if trial is None:
            return Tried(chosen=0, trial=None, runs=len(found))
        found[candidate] = trial
        if trial.outcome == "timeout":
            break
        good = [one for one in found.values() if one.outcome == "ok"]
        if not waiting and good:
            fastest = min(good, key=_cost_s).candidate
            waiting = [other for other in _neighbours(fastest, places) if other not in found]
    late = tuple(one for one in found.values() if one.outcome == "timeout")
    runs = len(found) + (0 if late else _confirm(found, run))
    failed = tuple(one for one in found.values() if one.outcome == "oom")
    good = [one for one in found.values() if one.outcome == "ok"]
    if not good:
        stuck = next((one for one in found.values() if one.outcome != "oom"), None)
        chosen = None if stuck is None else places[own if late and own in places else stuck.candidate]
        return Tried(chosen=chosen, trial=stuck or failed[-1], failed=failed, timed_out=late, runs=runs)
    trial = min(good, key=_cost_s)
    return Tried(chosen=places[trial.candidate], trial=trial, failed=failed, timed_out=late, runs=runs)


def _confirm(found: dict[Candidate, Trial], run: Run) -> int:
    """Times the two fastest again where they are close; how many runs that took."""
    good = sorted((one for one in found.values() if one.outcome == "ok"), key=_cost_s)[:2]
    if len(good) < 2 or _cost_s(good[1]) > (1 + CLOSE) * _cost_s(good[0]):
        return 0
    for one in good:
        again = run(one.candidate)
        if again is not None and again.outcome == "ok" and _cost_s(again) < _cost_s(one):
            found[one.candidate] = again
    return len(good)


def _neighbours(candidate: Candidate, pool: Iterable[Candidate]) -> list[Candidate]:
    """The next smaller and the next larger batch with the same other settings."""

    def batch(other: Candidate) -> int:
        return other.per_device_batch

    alike = [c for c in pool if replace(c, per_device_batch=1, accumulation=1) == replace(candidate, per_device_batch=1, accumulation=1)]
    smaller = max((c for c in alike if batch(c) < batch(candidate)), key=batch, default=None)
    larger = min((c for c in alike if batch(c) > batch(candidate)), key=batch, default=None)
    return [c for c in (smaller, larger) if c is not None]


def _untried(ranked: Sequence[tuple[Candidate, StepTime]], failed: Sequence[Trial], needs_bytes: NeedsBytes) -> int | None:
    """After too many failures the one that needs least; None when that failed too."""
    index = min(range(len(ranked)), key=lambda place: needs_bytes(ranked[place][0]))
    return None if any(trial.candidate == ranked[index][0] for trial in failed) else index


def _cost_s(trial: Trial) -> float:
    """All of them run with the same threads, so the CPU time compares them where it is known, whatever else the machine does."""
    return next((seconds for seconds in (trial.cpu_s, trial.step_s) if seconds is not None), float("inf"))


CLOSE_ENOUGH = 0.01  # an estimate this near to the measurement stands: the next limit would move by less than headroom is for
MOST_ROUNDS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmed:
    found: SearchResult
    verdict: Tried
    winner: tuple[Candidate, StepTime]  # of `found.ranked`, the one that `verdict` chose
    correction: Correction | None = None


def confirmed(
    found: SearchResult, search: Callable[[], SearchResult], pricing: Pricing, run: Run, *, timed_from: Candidate | None = None
) -> Confirmed:
    """`search` makes the search again with the corrected pricing; `timed_from`: measured times decide, from these settings on."""
    state = _tried(found, pricing, run, timed_from)
    for _ in range(MOST_ROUNDS):
        error = state.correction.memory_error if state.correction is not None else None
        if state.correction is None or error is None or abs(error) <= CLOSE_ENOUGH:
            break
        pricing.correct(state.correction)
        again = search()
        if not again.ranked:
            break
        if again.ranked[0][0] == state.winner[0]:
            return replace(state, found=again, verdict=replace(state.verdict, chosen=0), winner=again.ranked[0])
        retried = _tried(again, pricing, run, timed_from)
        runs = state.verdict.runs + retried.verdict.runs
        failed = (*state.verdict.failed, *retried.verdict.failed)
        state = replace(retried, verdict=replace(retried.verdict, runs=runs, failed=failed))
    return state


def _tried(found: SearchResult, pricing: Pricing, run: Run, timed_from: Candidate | None) -> Confirmed:

    @cache
    def needs() -> dict[Candidate, int]:
        """Asked only after a failure."""
        ranked = [candidate for candidate, _ in found.ranked]
        return {c: memory.device_bytes for c, memory in zip(ranked, pricing.nearest_memories(ranked), strict=True)}

    if timed_from is not None:
        verdict = timed(found.ranked, run, timed_from)
    else:
        verdict = tried(found.ranked, run, needs_bytes=lambda candidate: needs()[candidate])
    trial = verdict.trial
    if verdict.chosen is None:
        assert trial is not None
        raise NothingFits(
            f"nothing fits: {verdict.runs} setting(s) were predicted to fit and ran out of memory in the dry run: {trial.message}",
            hint="free memory on the device, leave more of it with --headroom, or see --allow",
        )
    correction = pricing.compare(trial) if trial is not None and trial.outcome == "ok" else None
    return Confirmed(found=found, verdict=verdict, winner=found.ranked[verdict.chosen], correction=correction)


Where = Literal["cuda", "cpu", "virtual"]
EXTENTS: dict[Where, Extent] = {
    "cuda": Extent(),
    "cpu": Extent(steps=40, enough_s=3.0),  # there the fastest of them decides among candidates, and other processes disturb
    "virtual": Extent(micro_batches=REHEARSED_MICRO_BATCHES),
}


def where_to_try(job: TrainJob, hardware: Hardware) -> Where | None:
    """The device itself, or the virtual GPU for a card that is not here; None where neither can be, and for several devices, DeepSpeed and
    optimizers that are not modelled: a plain run on one device would hold something else."""
    gpu = hardware.smallest
    if job.world_size > 1 or job.settings.engine.deepspeed is not None or stand_in(job.settings.optim) is not None:
        return None
    if not hardware.hypothetical:
        return "cpu" if gpu is None else "cuda"
    if gpu is None or gpu.vendor != "nvidia" or gpu.capability is None:
        return None
    return "virtual" if available() is None else None


NOT_REHEARSED = "answered from kept traces, without a rehearsal on the virtual GPU; --dry-run makes one"


class Tryout:
    """Tries candidates one after the other, each in a child of its own; closing it ends what was started and never asked.

    On a device that is here always. A rehearsal imports torch, so it is made where something is traced as well; a plan from kept traces
    has that of the same question, where it was made once, or none. `asked`: in any case, or never.
    """

    def __init__(self, progress: Progress, *, asked: bool | None = None, may_compile: bool = False) -> None:
        self.note: str | None = None  # why nothing can be tried, where that is news
        self._progress = progress
        self._asked = asked
        self._may_compile = may_compile
        self._job: TrainJob | None = None
        self._where: Where | None = None
        self._gpu: Gpu | None = None
        self._ready: Prepared | None = None
        self._used: list[Prepared] = []  # a rehearsal's process ends while its answer is read
        self._goes = False  # trials are worth their import

    def prepare(self, job: TrainJob, hardware: Hardware) -> None:
        if self._asked is False:
            return
        self._where, self._gpu = where_to_try(job, hardware), hardware.smallest
        self._job = job
        if self._where in ("cuda", "virtual") and missing_kernels(self._gpu, torch_build()) is not None:
            self._where, self.note = None, "not tried: the installed torch has no kernels for this card"
            return
        if self._asked or self._where != "virtual":
            self.start()

    def start(self) -> None:
        """Something is traced: the child may import meanwhile. More than once is as good as once."""
        if self._goes:
            return
        self._goes = self._job is not None
        try:
            self._ready = self._start()
        except VirtualGpuError as error:
            self._where, self.note = None, f"not rehearsed: {error}"

    def __call__(
        self, candidate: Candidate, evaluation: EvaluationPeak | None = None, meanwhile: Callable[[], object] = lambda: None
    ) -> Trial | None:
        """`meanwhile` is called while a rehearsal runs; on a device that is here steps are timed, and nothing else is done."""
        if self._where is None:
            return None
        if self._where == "virtual" and (own := _own_kernels(candidate)) is not None:
            self.note = f"not rehearsed: {own} brings CUDA code of its own, which the virtual GPU does not run"
            return None
        if candidate.use_liger_kernel and find_spec("liger_kernel") is None:
            self.note = "not tried: use_liger_kernel needs the package liger-kernel, which is not installed here"
            return None
        parts = None if self._where != "virtual" else rehearsal_parts(self._job, self._gpu, candidate, evaluation)
        if (known := kept_rehearsal(parts)) is not None:
            return known
        if not self._goes:
            self.note = NOT_REHEARSED
            return None
        device = self._gpu.name if self._gpu is not None else "the CPU"
        virtual = " (virtual)" if self._where == "virtual" else ""
        self._progress(f"trying {candidate.per_device_batch} × {candidate.accumulation} on {device}{virtual}")
        ready, self._ready = self._ready or self._start(), None
        assert ready is not None
        self._used.append(ready)
        try:
            trial = ready.run(candidate, evaluation=evaluation, meanwhile=meanwhile if self._where == "virtual" else lambda: None)
            if self._where != "virtual":
                self.close()  # its memory is the next one's
        except KeyboardInterrupt:
            self.close()
            self.note = f"interrupted: the best answer so far, not tried on {device}"
            self._where = None
            return None
        if self._where == "virtual" and trial.outcome == "error" and UNSUPPORTED in (trial.message or ""):
            self.note = f"not rehearsed: the virtual GPU has no {_library(trial.message or '')} call that this model makes"
            self._where = None
            return None
        keep_rehearsal(parts, trial)
        return trial

    def close(self) -> None:
        for one in (*self._used, *([] if self._ready is None else [self._ready])):
            one.close()
        self._used.clear()
        self._ready = None

    def __enter__(self) -> Tryout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Prepared | None:
        if self._where is None or self._job is None:
            return None
        gpu = self._gpu
        context = 0
        if self._where == "virtual" and gpu is not None:
            context = context_bytes(gpu.capability or (8, 0), multiprocessors=gpu.sms)
        eager = self._where == "virtual" and not (self._may_compile or self._job.settings.torch_compile)
        return Prepared(self._job, device=self._where, gpu=gpu, context_bytes=context, extent=EXTENTS[self._where], eager=eager)


UNSUPPORTED = "_STATUS_NOT_SUPPORTED"  # what the stand-ins of cuDNN and its kin answer to what they do not know


def _library(message: str) -> str:
    named = re.search(rf"\b(\w+?){UNSUPPORTED}", message)
    return "library" if named is None else named[1]


def _own_kernels(candidate: Candidate) -> str | None:
    name = candidate.attn_implementation or ""
    return name if name.startswith("flash_attention") else None
