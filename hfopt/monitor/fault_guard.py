"""Never hurt the run: the one place that catches every error, reports it once and switches off the part that failed.

The monitor's work is split into parts (readings, log file, live line, reporting, ...). A method that belongs to a part is wrapped by
`switched_off_on_error(part)`: when it raises, the part stays off for the rest of the session and the method returns None from then on.
What the machine may give back (room on a disk, a folder on a network) is wrapped by `retried_each_time(part)` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from hfopt.redact import said


class Faults:
    """Which parts are off, and why. `say` reports it to a person, `then` is called with the part that went off."""

    def __init__(self, say: Callable[[str], None], then: Callable[[str], None] | None = None) -> None:
        self._say, self._then = say, then
        self.off: dict[str, str] = {}
        self._in_a_row: dict[str, int] = {}
        self.lost: dict[str, int] = {}  # by part, what could not be written so far

    def failed(self, part: str, error: BaseException, *, most: int) -> None:
        """For what may be out of reach for a moment: reported at the first failure, off after `most` in a row."""
        self._in_a_row[part] = count = self._in_a_row.get(part, 0) + 1
        if count >= most:
            self.report(part, error)
        elif count == 1:
            self._say(f"hfopt monitor: {part} failed ({_words(error)}) and is tried again with the next finding; training continues")

    def missed(self, part: str, error: OSError) -> None:
        """For what is tried again as long as the run lasts: reported the first time only."""
        if part not in self.lost:
            self._say(f"hfopt monitor: {part} cannot be written ({_words(error)}) and is tried again each time; training continues")
        self.lost[part] = self.lost.get(part, 0) + 1

    def worked(self, part: str) -> None:
        self._in_a_row.pop(part, None)

    def report(self, part: str, error: BaseException) -> None:
        if part in self.off:
            return
        self.off[part] = why = _words(error)
        self._say(f"hfopt monitor: {part} is switched off ({why}); training continues")
        if self._then is not None:
            self._then(part)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {said(str(error))}" if str(error) else type(error).__name__


Method = TypeVar("Method", bound=Callable[..., Any])


def switched_off_on_error(part: str) -> Callable[[Method], Method]:
    """Wraps a method of an object with `.faults`: no error ever leaves it; after one, it returns None."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if part in self.faults.off:
                return None
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - whatever breaks in a watcher, the training it watches must go on
                self.faults.report(part, error)
                return None

        return cast(Method, guarded)

    return decorate


def retried_each_time(part: str) -> Callable[[Method], Method]:
    """As `switched_off_on_error`, but the system's own refusals (OSError) leave the part on: the next write may succeed."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def tried(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except OSError as error:
                self.faults.missed(part, error)
                return None

        return switched_off_on_error(part)(cast(Method, tried))

    return decorate


def to_stderr(message: str) -> None:
    sys.stderr.write(f"{said(message)}\n")
