"""Which findings are new and which are over: each is reported once when it shows and once when it is gone.

Said once: a cause is told when it first shows and again when it is gone, not at every step.

Keeps the last stretch of windows, has it diagnosed, and says what is new and what is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from hfopt.monitor.diagnose import diagnose
from hfopt.monitor.journal import Journal
from hfopt.monitor.window import merge
from hfopt.schema import Change, Finding, RankLag, RunFacts, Window

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
_LEAST_S, _LEAST_STEPS = 1.0, 10  # before that the run is not told anything
_NEWS = 0.1  # of the stretch that must be new for another verdict
_GOOD = "compute_bound"


class Judge:
    def __init__(
        self,
        run: RunFacts,
        journal: Journal,
        say: Callable[[str], None],
        warn_below: float,
        alert: Callable[[Finding, int], object] = lambda finding, step: None,
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
        for finding in findings:
            if finding.cause not in self._told:
                self._journal.finding(finding, total.last_step)
                if finding.cause != _GOOD:
                    self._alert(finding, total.last_step)
        return findings

    def report(self, finding: Finding, step: int) -> None:
        """A finding of another look than the windows': said and written once, and active to the end."""
        self._new(finding, step)
        self._journal.state["findings"] = [*self._journal.state["findings"], sentence(finding)]

    def _tell(self, window: Window, findings: tuple[Finding, ...]) -> None:
        new, resolved = self._alarms.update(findings)
        for finding in new:
            self._new(finding, window.last_step)
        for finding in resolved:
            self._journal.write("resolved", step=window.last_step, cause=finding.cause)
            if finding.cause != _GOOD:
                self._say(f"hfopt: resolved at step {window.last_step}: {finding.cause}")
        self._journal.state["findings"] = [sentence(finding) for finding in self._alarms.active.values()]
        self._low_utilization(window, findings)

    def _new(self, finding: Finding, step: int) -> None:
        self._told.add(finding.cause)
        self._journal.finding(finding, step)
        if finding.cause != _GOOD:
            self._say(f"hfopt: {sentence(finding)}")
            self._alert(finding, step)

    def _low_utilization(self, window: Window, findings: tuple[Finding, ...]) -> None:
        utils = [gpu.sm_util.mean for gpu in window.gpus if gpu.sm_util]
        if not utils or self._low_said or findings or window.steps < 5:
            return
        util = 100 * sum(utils) / len(utils)
        if util < self._warn_below:
            self._low_said = True
            text = f"the GPU ran a kernel in only {util:.0f} % of the time (warn_below={self._warn_below:.0f}); no single cause explains it"
            self._journal.write("warning", step=window.last_step, message=text)
            self._say(f"hfopt: {text}")
