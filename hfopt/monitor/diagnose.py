"""From evidence to findings: the rules that name a bottleneck, and which findings are new and which are over.

A cause is reported when it first shows and again when it is gone, not at every step.

NVML's utilization says that a kernel ran, not that it did much, so it decides nothing alone. A share is judged against its part of the
training time; every finding carries the numbers it rests on. What the machine does not tell (None) never counts as evidence.

Known limits: with `logging_nan_inf_filter=False` the host runs ahead of the card, so phase times are those of launching; data wait then
counts only if the card is idle too, and logging is not judged. Without power, MFU and traffic readings a card can only be found input-
bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from hfopt.monitor import advice, evidence
from hfopt.monitor.evidence import (
    DEFAULT,
    Thresholds,
    arithmetic_share,
    busiest,
    compute_mfu,
    confidence,
    finding,
    long_enough_to_judge,
    one_busy_core,
    power_share,
)
from hfopt.monitor.log import Journal
from hfopt.monitor.window import data_share, merge
from hfopt.schema import Cause, Change, Finding, RankLag, RunFacts, Window
from hfopt.units import format_percent, format_seconds

_GONE_AFTER = 3  # diagnoses in a row without it


class Alarms:
    """Which causes hold now."""

    def __init__(self) -> None:
        self.active: dict[str, Finding] = {}
        self._missed: dict[str, int] = {}

    def update(self, findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
        """(new, resolved)."""
        found: dict[str, Finding] = {finding.cause: finding for finding in findings}
        new = [finding for cause, finding in found.items() if cause not in self.active]
        resolved: list[Finding] = []
        for cause in list(self.active):
            self._missed[cause] = 0 if cause in found else self._missed.get(cause, 0) + 1
            if self._missed[cause] >= _GONE_AFTER:
                resolved.append(self.active.pop(cause))
                del self._missed[cause]
        self.active.update(found)
        return new, resolved


def sentence(finding: Finding) -> str:
    """One line: the cause, what is seen, what to change and what that should bring."""
    text = f"{finding.cause}: {finding.message}"
    if finding.changes:
        text += ". Try " + ", ".join(_change(change) for change in finding.changes) + f": {finding.changes[0].reason}"
    if finding.predicted_gain:
        text += f" (predicted: up to {100 * finding.predicted_gain:.0f} % more samples/s)"
    return text


def _change(change: Change) -> str:
    return f"{change.key}={change.after}" + (f" (is {change.before})" if change.before is not None else "")


_RECENT_S, _RECENT_STEPS = 10.0, 20  # a verdict rests on at least so much, if there is so much
_LEAST_S, _LEAST_STEPS = 1.0, 10  # before that nothing is reported
_NEWS = 0.1  # of the stretch that must be new for another verdict
_GOOD = "compute_bound"


class Judge:
    def __init__(
        self,
        run: RunFacts,
        journal: Journal,
        say: Callable[[str], None],
        warn_below: float,
        alert: Callable[[Finding, int], object] = lambda found, step: None,
    ) -> None:
        self._run, self._journal, self._say, self._warn_below, self._alert = run, journal, say, warn_below, alert
        self._recent: deque[Window] = deque(maxlen=256)
        self._unjudged_s = 0.0
        self._alarms = Alarms()
        self._told: set[str] = set()
        self._low_said = False

    def add(self, window: Window) -> None:
        self._recent.append(window)
        self._unjudged_s += window.seconds
        while len(self._recent) > 1 and self._enough(list(self._recent)[1:]):
            self._recent.popleft()

    @staticmethod
    def _enough(windows: list[Window]) -> bool:
        return sum(w.seconds for w in windows) >= _RECENT_S and sum(w.steps for w in windows) >= _RECENT_STEPS

    def recent(self, lags: tuple[RankLag, ...]) -> None:
        """The verdict on the last stretch."""
        if self._recent and self._unjudged_s >= _NEWS * sum(window.seconds for window in self._recent):
            window = merge(list(self._recent))
            if window.seconds < _LEAST_S and window.steps < _LEAST_STEPS:
                return
            self._unjudged_s = 0.0
            self._tell(window, diagnose(window, replace(self._run, lags=lags)))

    def whole(self, total: Window, lags: tuple[RankLag, ...]) -> tuple[Finding, ...]:
        """The verdict on the run; what shows only over all of it is written now. The summary tells them all."""
        findings = diagnose(total, replace(self._run, lags=lags))
        for found in findings:
            if found.cause not in self._told:
                self._journal.finding(found, total.last_step)
                if found.cause != _GOOD:
                    self._alert(found, total.last_step)
        return findings

    def report(self, found: Finding, step: int) -> None:
        """A finding of another look than the windows': said and written once, and active to the end."""
        self._new(found, step)
        self._journal.state["findings"] = [*self._journal.state["findings"], sentence(found)]

    def _tell(self, window: Window, findings: tuple[Finding, ...]) -> None:
        new, resolved = self._alarms.update(findings)
        for found in new:
            self._new(found, window.last_step)
        for found in resolved:
            self._journal.write("resolved", step=window.last_step, cause=found.cause)
            if found.cause != _GOOD:
                self._say(f"hfopt: resolved at step {window.last_step}: {found.cause}")
        self._journal.state["findings"] = [sentence(found) for found in self._alarms.active.values()]
        self._low_utilization(window, findings)

    def _new(self, found: Finding, step: int) -> None:
        self._told.add(found.cause)
        self._journal.finding(found, step)
        if found.cause != _GOOD:
            self._say(f"hfopt: {sentence(found)}")
            self._alert(found, step)

    def _low_utilization(self, window: Window, findings: tuple[Finding, ...]) -> None:
        utils = [gpu.sm_util.mean for gpu in window.gpus if gpu.sm_util]
        if not utils or self._low_said or findings or window.steps < 5:
            return
        util = 100 * sum(utils) / len(utils)
        if util < self._warn_below:
            self._low_said = True
            text = f"the GPU ran kernels for only {util:.0f} % of the time (warn_below={self._warn_below:.0f}); no single cause explains it"
            self._journal.write("warning", step=window.last_step, message=text)
            self._say(f"hfopt: {text}")


def diagnose(window: Window, run: RunFacts, limits: Thresholds = DEFAULT) -> tuple[Finding, ...]:
    """What the window shows, the weightiest first; compute_bound (the good one) only when nothing else explains the pace."""
    if not long_enough_to_judge(window, limits):
        return ()
    found = [one for check in _CHECKS if (one := check(window, run, limits)) is not None]
    causes = {one.cause for one in found}
    slowed = causes & {"input_bound", "pcie_bound", "slow_rank", "shared_gpu", "throttled", "cpu_starved"}
    others_known = run.world_size == 1 or bool(run.lags)  # who waits for a slow rank looks idle as well
    if not slowed - {"input_bound", "cpu_starved"} and others_known and (launch := _launch_bound(window, run, limits)) is not None:
        found.append(launch)
        slowed.add("launch_bound")
    if (
        "input_bound" not in causes
        and (room := evidence.memory_headroom(window, run, limits, launch_bound="launch_bound" in slowed)) is not None
    ):
        found.append(room)
    if not slowed and (good := _compute_bound(window, run, limits)) is not None:
        found.append(good)
    found.sort(key=lambda one: (one.cause == "compute_bound", -(one.predicted_gain or 0.0), -one.confidence))
    return tuple(found)


def _input_bound(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    share, gpu = data_share(window), busiest(window)
    busy = gpu is not None and gpu.sm_util is not None and gpu.sm_util.mean >= limits.busy_sm
    if share < limits.data_wait or (busy and not window.synced):
        return None
    remedy = advice.more_loader(window, run)
    evidence = {
        "data_wait_share": share,
        "data_wait_s_per_step": window.phases.data_wait_s / window.steps,
        "sm_util": gpu.sm_util.mean if gpu and gpu.sm_util else None,
        "worker_util": window.worker_util,
        "cpu_util": window.cpu_util.mean if window.cpu_util else None,
    }
    message = (
        f"the step waits {format_percent(share)} of the time for data ({format_seconds(evidence['data_wait_s_per_step'] or 0.0)} per step)"
    )
    return finding("input_bound", confidence(share, limits.data_wait, 0.4), evidence, message, remedy)


def _share_check(cause: Cause) -> Callable[[Window, RunFacts, Thresholds], Finding | None]:
    """Evaluation, logging and saving are judged alike: a share of the wall clock, over more than one occurrence."""

    def check(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
        phases = window.phases
        spent_s, times, limit, what = {
            "eval_heavy": (phases.eval_s, window.evals, limits.eval_share, "evaluation"),
            "logging_heavy": (phases.logging_s, window.logs, limits.logging_share, "logging"),
            "saving_heavy": (phases.save_s, window.saves, limits.save_share, "saving checkpoints"),
        }[cause]
        if times < 2 or phases.total_s <= 0 or (cause == "logging_heavy" and not _logging_is_own(window, run, limits)):
            return None
        share = spent_s / phases.total_s
        if share < limit:
            return None
        message = f"{what} takes {format_percent(share)} of the time ({times} times, {format_seconds(spent_s / times)} each)"
        evidence = {"share": share, "times": float(times), "seconds_each": spent_s / times}
        return finding(cause, confidence(share, limit, 2 * limit), evidence, message, advice.less_often(cause, share, run))

    return check


def _logging_is_own(window: Window, run: RunFacts, limits: Thresholds) -> bool:
    """Logging reads the loss, from the card and from all ranks, so whoever is awaited there would be counted as logging."""
    if run.world_size > 1 and (not run.lags or _slow_rank(window, run, limits) is not None):
        return False
    return window.synced


def _padding_waste(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    share = window.padding_share
    if share is None or share < limits.padding:
        return None
    remedy = advice.less_padding(share, bool(window.fixed_length), run)
    evidence = {"padding_share": share, "fixed_length": float(window.fixed_length) if window.fixed_length is not None else None}
    message = f"{format_percent(share)} of the tokens are padding"
    return finding("padding_waste", confidence(share, limits.padding, 0.6), evidence, message, remedy)


def _slow_rank(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    worst: RankLag | None = max(run.lags, key=lambda lag: lag.lag_s / lag.step_s if lag.step_s else 0.0, default=None)
    if worst is None or not worst.step_s or worst.lag_s / worst.step_s < limits.rank_lag:
        return None
    share = worst.lag_s / worst.step_s
    evidence = {"rank": float(worst.rank), "lag_s": worst.lag_s, "lag_share": share}
    message = f"rank {worst.rank} is {format_seconds(worst.lag_s)} late in every step ({worst.where}, {format_percent(share)} of it)"
    message += "; all others wait for it"
    remedy = advice.SettingAdvice(predicted_gain=round(share / (1 - share), 2) if share < 0.95 else None)
    return finding("slow_rank", confidence(share, limits.rank_lag, 0.3), evidence, message, remedy)


def _launch_bound(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    gpu, mfu = busiest(window), compute_mfu(window)
    power = power_share(gpu) if gpu else None
    sm = gpu.sm_util.mean if gpu and gpu.sm_util else None
    bandwidth = gpu.memory_util.mean if gpu and gpu.memory_util else None
    known = [share < limit for share, limit in ((mfu, limits.idle_mfu), (power, limits.idle_power)) if share is not None]
    little_work = bool(known) and all(known) and (bandwidth is None or bandwidth < limits.idle_bandwidth)
    gaps = gpu is None or (sm is not None and sm < limits.busy_sm) or len(known) == 2
    waiting = data_share(window) >= (limits.mostly_waiting if mfu is not None else limits.data_wait)  # only MFU can be freed of the waits
    arithmetic = arithmetic_share(window, run, limits)
    large = arithmetic is not None and arithmetic >= limits.mostly_arithmetic
    if not little_work or not gaps or waiting or large or not one_busy_core(window, limits):
        return None
    evidence = {
        "mfu": mfu,
        "power_share": power,
        "sm_util": sm,
        "main_thread_util": window.main_thread_util,
        "arithmetic_share": arithmetic,
        "data_wait_share": data_share(window),
    }
    message = (
        f"the host cannot launch the many small operations fast enough: one core is busy, the {'card' if gpu else 'arithmetic'} is not"
    )
    message += f" ({format_percent(mfu)} of its peak FLOPs)" if mfu is not None else ""
    idle, limit = (mfu, limits.idle_mfu) if mfu is not None else (power or 0.0, limits.idle_power)
    sure = confidence(-idle, -limit, -0.02)
    return finding("launch_bound", sure, evidence, message, advice.larger_kernels(window, run))


def _compute_bound(window: Window, run: RunFacts, limits: Thresholds) -> Finding | None:
    gpu, mfu = busiest(window), compute_mfu(window)
    power = power_share(gpu) if gpu else None
    sm = gpu.sm_util.mean if gpu and gpu.sm_util else None
    bandwidth = gpu.memory_util.mean if gpu and gpu.memory_util else None
    if gpu is not None and (sm is None or sm < limits.busy_sm):
        return None
    high = ((mfu, limits.busy_mfu), (power, limits.busy_power), (bandwidth, limits.busy_bandwidth))
    working = [share / limit for share, limit in high if share is not None and share >= limit]
    if not working:
        return None
    evidence = {"mfu": mfu, "power_share": power, "sm_util": sm, "memory_util": bandwidth, "data_wait_share": data_share(window)}
    where = "card" if gpu else "processor"
    return finding(
        "compute_bound", confidence(max(working), 1.0, 1.5), evidence, f"the {where} is well used: it computes, nothing holds it up"
    )


_CHECKS: tuple[Callable[[Window, RunFacts, Thresholds], Finding | None], ...] = (
    _input_bound,
    _share_check("eval_heavy"),
    _share_check("logging_heavy"),
    _share_check("saving_heavy"),
    _padding_waste,
    evidence.throttled,
    evidence.shared_gpu,
    evidence.near_limit,
    evidence.fragmentation,
    evidence.pcie_bound,
    _slow_rank,
    evidence.cpu_starved,
)
