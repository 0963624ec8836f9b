"""Said once: a cause is told when it first shows and again when it is gone, not at every step."""

from __future__ import annotations

from collections.abc import Iterable

from hfopt.schema import Change, Finding

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
