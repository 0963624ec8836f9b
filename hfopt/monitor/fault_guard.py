"""Never hurt the run: the one place where every error is caught, said once, and the part that failed is switched off.

The monitor's work is split into parts (readings, log file, live line, reporting, ...). A method that belongs to a part is wrapped by
`harmless(part)`; when it raises, the part is off for the rest of the session and the method returns None from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from hfopt.redact import said


class Faults:
    """Which parts are off, and why. `say` is how a person hears of it, `then` is told the part that went off."""

    def __init__(self, say: Callable[[str], None], then: Callable[[str], None] | None = None) -> None:
        self._say, self._then = say, then
        self.off: dict[str, str] = {}
        self._in_a_row: dict[str, int] = {}

    def failed(self, part: str, error: BaseException, *, most: int) -> None:
        """Of what may be out of reach for a moment: reported at the first failure, off after `most` in a row."""
        self._in_a_row[part] = count = self._in_a_row.get(part, 0) + 1
        if count >= most:
            self.report(part, error)
        elif count == 1:
            self._say(f"hfopt monitor: {part} failed ({_words(error)}) and is tried again with the next finding; training continues")

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


def harmless(part: str) -> Callable[[Method], Method]:
    """Wraps a method of an object with `.faults`: an error inside it never leaves it, the answer is then None."""

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


def to_stderr(message: str) -> None:
    sys.stderr.write(f"{said(message)}\n")
