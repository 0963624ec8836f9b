"""The algorithm on one page: read, trace, search, price, explain.

1. The effective batch is fixed, unless the user asked for another.
2. Every exact divisor × precision × checkpointing is a candidate; what the user keeps is pinned.
3. What cannot fit is settled by counting. The rest best-first: bounds, a trace only for what could win, memory by replay; the fastest wins.
4. The loader is sized for the winner's demand; every change gets its reason.
5. Where a device is here, the winner is tried on it, and what was measured is shown beside what was predicted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from hfopt.errors import ConfigError, NothingFits
from hfopt.facts.training_keys import installed
from hfopt.job.request import Progress, Request
from hfopt.job.subject import Subject, from_file, workload_of
from hfopt.memory.counted_step import FirstAnswer, counted_workload
from hfopt.model.stored_workload import whole
from hfopt.planner.choices import current_candidate, likely, precisions_of, space_of
from hfopt.planner.conclusion import LARGER_BATCHES, Planning, conclude, grows_by_rule
from hfopt.planner.engines import plan_devices
from hfopt.planner.nothing_fits import HEAVY_SHARE, LONG_TOKENS, WOULD_FIT, Rescue
from hfopt.planner.result import Plan
from hfopt.planner.search import TIE, SearchResult, Space, best_first, candidates
from hfopt.planner.trials import Confirmed, Tried, Tryout, confirmed
from hfopt.pricing.candidate_prices import Pricing
from hfopt.pricing.compiled import COMPILE
from hfopt.pricing.dataloader import Feeding
from hfopt.pricing.evaluation_choice import first_evaluation
from hfopt.pricing.forked_traces import Estimator, kept_traces
from hfopt.pricing.target_device import TargetDevice, device_of
from hfopt.schema import Candidate, EvaluationPeak, Hardware, Neutrality, Rejection, TrainJob, Trial, Workload
from hfopt.units import format_bytes

TryOne = Callable[[Candidate, EvaluationPeak | None, Callable[[], object]], Trial | None]
OwnPrice = Callable[[str], None]


def make_plan(
    source: Any,
    request: Request,
    *,
    progress: Progress = lambda text: None,
    estimator: Estimator | None = None,
    announce: Progress = lambda text: None,
) -> Plan:
    """The fastest settings that fit. `source` is a path to a YAML, a TrainingArguments (with `model=`), or a Trainer. `announce` hears what
    is sure before torch is imported, where it has to be."""
    started = time.perf_counter()
    first: list[str] = []

    def known(job: TrainJob, hardware: Hardware, found: FirstAnswer | None) -> Workload | None:
        """Where counting alone settles it, nothing is imported and nothing tried."""
        if found is not None and found.verdict == "impossible" and not request.allow:
            counted = counted_workload(job, partial(workload_of, job, lean=request.own_process))
            if counted is not None:
                return counted
        first.extend([] if found is None else [found.words])
        if tryout is not None:
            tryout.prepare(job, hardware)
        return None

    def priced(answer: str) -> None:
        first[:] = [answer] if first else []  # else it was said, and torch imported

    def begin() -> None:
        while first:
            announce(first.pop())
        if "torch" not in sys.modules:
            progress("importing torch and transformers")
        if tryout is not None:
            tryout.start()

    tryout = None if request.dry_run is False else Tryout(progress, asked=request.dry_run, may_compile=COMPILE in request.allow)
    with tryout or nullcontext():
        if isinstance(source, (str, PathLike)):
            subject = from_file(Path(source), request, known=known, begin=begin)
        else:
            from hfopt.job.live_trainer import from_live

            subject = from_live(source, request)
        read_s = time.perf_counter() - started
        with kept_traces(estimator, in_child=request.own_process, begin=begin) as traces:
            ask = partial(plan_subject, request=request, progress=progress, estimator=traces, run=tryout, priced=priced)
            made = _on_its_devices(subject, request, ask)
    if tryout is not None and tryout.note is not None:
        made = replace(made, facts=replace(made.facts, notes=(*made.facts.notes, tryout.note)))
    return replace(made, seconds={"read": read_s, "plan": time.perf_counter() - started - read_s})


def _on_its_devices(subject: Subject, request: Request, plan_one: Callable[[Subject], Plan]) -> Plan:
    """With one device, or for a process group that is already up, the config's own engine; else the one that suits."""
    if subject.job.world_size > 1 and subject.loaded is not None:
        return plan_devices(subject, request, plan_one)
    if request.engine is not None and subject.job.world_size == 1:
        raise ConfigError(f"--engine {request.engine} is for several devices", hint="say how many with --num-gpus")
    return plan_one(subject)


def plan_subject(
    subject: Subject,
    request: Request,
    *,
    progress: Progress = lambda text: None,
    estimator: Estimator | None = None,
    run: TryOne | None = None,
    priced: OwnPrice = lambda answer: None,
) -> Plan:
    """The same for what is already read; `hfopt compare` asks it once per card with one estimator. `priced` hears what the config takes as
    it is, in words."""
    device = device_of(subject, request)
    with device.pricing(subject, estimator, progress) as pricing:
        made = _planned(subject, request, device, pricing, run, priced)
    if made is not None:
        return made
    return plan_subject(
        replace(subject, workload=whole(subject.workload)), request, progress=progress, estimator=estimator, run=run, priced=priced
    )


def _planned(
    subject: Subject,
    request: Request,
    device: TargetDevice,
    pricing: Pricing,
    run: TryOne | None,
    priced: OwnPrice,
) -> Plan | None:
    """None where the model was only counted, and it may fit after all: to be asked again with the model itself."""
    current = current_candidate(subject)
    allowed = precisions_of(subject, device, current)
    space = space_of(subject, request, device, allowed, current)

    pool = candidates(space)
    pricing.most_traces = len({pricing.settings(candidate) for candidate in pool})
    pricing.enough_batch = LARGER_BATCHES[-1] * space.effective_batch // space.world_size
    rescue = Rescue(subject=subject, device=device, pricing=pricing, pool=pool)
    if _is_crowded(subject, device, pricing, pool) and rescue.hopeless():
        raise rescue.error()
    if subject.workload.blocks is not None:
        return None
    evaluation = first_evaluation(subject, pricing, on_gpu=device.gpu is not None)
    first = likely(pool, device, current)
    pricing.expect(first, () if evaluation is None else evaluation.expected(first[0], current))
    pricing.time(current)  # the config's own trace is needed in any case, and bounds what shares it
    before = pricing.memory(current), pricing.fits(current)
    priced(device.first_words(*before))
    search = Search(subject=subject, request=request, space=space, pricing=pricing, current=current, progress=pricing.progress)
    feeding = Feeding(subject=subject, host=subject.hardware.host, ranks=subject.job.world_size, on_gpu=device.gpu is not None)

    def searched() -> SearchResult:
        found = search()
        return found if device.gpu is None or not found.ranked else own_first_where_loader_limits(found, current, feeding)

    found = searched()
    if not found.ranked:
        tried_pool = pool if search.refused is None else tuple(c for c in pool if c.accumulation == subject.job.accumulation)
        raise search.explained(replace(rescue, pool=tried_pool).error())
    if search.interrupted:
        evaluation = None

    planning = Planning(
        subject=subject,
        request=request,
        device=device,
        space=space,
        allowed=allowed,
        pricing=pricing,
        current=current,
        before=before,
        feeding=feeding,
        result=Confirmed(found=found, verdict=Tried(chosen=0, trial=None), winner=found.ranked[0]),
        neutrality=search.neutrality,
        evaluation=evaluation,
    )
    if run is not None and not search.interrupted:

        def tried(candidate: Candidate) -> Trial | None:
            return run(candidate, None if evaluation is None else evaluation.planned(candidate)[0], partial(_ask_ahead, planning))

        result = confirmed(found, searched, pricing, tried, timed_from=current if device.gpu is None else None)
        planning = replace(planning, result=result, neutrality=search.neutrality)
    made = conclude(planning)
    if search.interrupted:
        made = replace(made, facts=replace(made.facts, warnings=(*made.facts.warnings, search.interrupted)))
    return made


def _ask_ahead(planning: Planning) -> None:
    """While the winner is tried elsewhere: what a conclusion traces and replays is at hand afterwards. A trial may correct its answers, so
    they are not kept."""
    conclude(replace(planning, evaluation=None if planning.evaluation is None else planning.evaluation.aside()))


def _is_crowded(subject: Subject, device: TargetDevice, pricing: Pricing, pool: Sequence[Candidate]) -> bool:
    """What surely stays fills much of the device, or samples are long: whether anything fits is asked before anything is traced."""
    least = min(pricing.least_bytes(candidate) for candidate in pool)
    return least >= HEAVY_SHARE * device.budget_bytes or (subject.workload.tokens_per_sample or 0) >= LONG_TOKENS


@dataclass(kw_only=True)
class Search:
    """The search, which may be asked again when a dry run has corrected the pricing."""

    subject: Subject
    request: Request
    space: Space
    pricing: Pricing
    current: Candidate
    progress: Progress
    neutrality: Neutrality | None = None
    refused: SearchResult | None = None  # what would fit with another accumulation, where that would train something else
    interrupted: str | None = None  # said where Ctrl-C ended the search, and what was traced by then answers
    _asked: bool = False

    def __call__(self) -> SearchResult:
        found = self._best(self.space)
        self._ask_neutrality(found)
        if self.neutrality is not None and not self.neutrality.neutral and "accumulation" not in self.request.allow:
            return self._with_accumulation(found)
        return found

    def _best(self, space: Space) -> SearchResult:
        pool = candidates(space)
        try:
            return self._best_of(pool if self.interrupted is None else self._with_trace(pool))
        except KeyboardInterrupt:
            traced = self._with_trace(pool)
            found = self._best_of(traced)
            if not found.ranked:
                raise
            self.interrupted = f"interrupted: the best of {len(traced)} of {len(pool)} settings, not tried, its evaluation not priced"
            return found

    def _best_of(self, pool: Sequence[Candidate]) -> SearchResult:
        return best_first(pool, self.pricing, self.pricing.budget_bytes, current=self.current)

    def _with_trace(self, pool: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in pool if self.pricing.has_own_trace(candidate)]

    def _ask_neutrality(self, found: SearchResult) -> None:
        """Only when the best candidate would trade batch for accumulation and nobody allowed that: it takes a second of real steps.
        A live run that accumulates is asked in any case: a few forward passes."""
        subject, space = self.subject, self.space
        trades = bool(found.ranked) and found.ranked[0][0].accumulation != subject.job.accumulation
        concerned = trades or (subject.trainer is not None and subject.job.accumulation > 1)
        if self._asked or not concerned or space.accumulation is not None or space.effective_batch != subject.job.effective_batch:
            return
        self._asked = True
        if subject.trainer is not None:  # asked even where it is allowed: the run may be repaired
            from hfopt.probe.live_neutrality import probe_live

            self.neutrality = probe_live(subject.trainer) or _unknown(subject)
        elif "accumulation" not in self.request.allow and subject.loaded is not None:
            from hfopt.probe.neutrality import probe

            self.progress("checking whether batch may be traded for accumulation")
            self.neutrality = probe(subject.job, subject.workload) or (_unknown(subject, by_rule=True) if grows_by_rule(subject) else None)

    def _with_accumulation(self, free: SearchResult) -> SearchResult:
        """The search again with the config's accumulation. Where that does not fit, only a live run is traded, and only one that is
        repaired: it trains the same. A file would train something else, so nothing fits, and what would is said."""
        accumulation = self.subject.job.accumulation
        kept = self._best(replace(self.space, accumulation=accumulation))
        if not kept.ranked:
            repaired = self.subject.trainer is not None and self.neutrality is not None and self.neutrality.fixable
            self.refused = None if repaired else free
            return free if repaired else kept
        reason = f"would change the gradients: the model is not neutral to accumulation, which stays at {accumulation}"
        traded = tuple(Rejection(candidate=c, reason=reason) for c, _ in free.ranked if c.accumulation != accumulation)
        return SearchResult(ranked=kept.ranked, rejected=(*traded, *kept.rejected))

    def explained(self, error: NothingFits) -> NothingFits:
        """With what fits at another accumulation put first, where that was refused."""
        if self.refused is None or self.neutrality is None or not self.refused.ranked:
            return error
        found, (best, _) = self.neutrality, self.refused.ranked[0]
        size = format_bytes(self.pricing.memory(best).device_bytes)
        pair = f"{best.per_device_batch} × {best.accumulation}"
        lines = [f"{pair} in {size} with --allow accumulation, which trains something else: {found.reason}"]
        if found.fixable:
            lines.insert(0, f"{pair} in {size} under `hfopt run -- SCRIPT`, which makes the Trainer divide, so that the same is trained")
        _, _, others = (error.hint or "").partition(f"{WOULD_FIT}\n")
        hint = "\n".join([WOULD_FIT, *(f"    - {line}" for line in lines), *([others] if others else [])])
        return NothingFits(f"{error}, at the config's accumulation of {self.subject.job.accumulation}", hint=hint)


def own_first_where_loader_limits(found: SearchResult, current: Candidate, feeding: Feeding) -> SearchResult:
    """The config's own settings first, where the loader allows the winner no more samples than them: it would take memory for nothing."""
    (winner, time), own = found.ranked[0], dict(found.ranked).get(current)
    if own is None or winner == current or winner.per_device_batch < current.per_device_batch:
        return found
    loader = feeding.planned(winner, time)
    rates = [feeding.limited(one, alone, loader).samples_per_s for one, alone in ((winner, time), (current, own))]
    if rates[0] > (1 + TIE) * rates[1]:
        return found
    others = tuple(pair for pair in found.ranked if pair[0] != current)
    return replace(found, ranked=((current, own), *others))


def _unknown(subject: Subject, *, by_rule: bool = False) -> Neutrality:
    """A live loss that cannot be asked is not traded on: the run is real. Nor is a head of which the rule says that it grows."""
    return Neutrality(
        model_class=subject.workload.model_class,
        transformers_version=installed().version,
        neutral=False,
        ratio=1.0,
        fixable=by_rule,
        reason=f"{subject.workload.model_class}: could not check whether its loss is neutral to accumulation",
    )
