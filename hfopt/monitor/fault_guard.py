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

    def report(self, part: str, error: BaseException) -> None:
        if part in self.off:
            return
        why = f"{type(error).__name__}: {said(str(error))}" if str(error) else type(error).__name__
        self.off[part] = why
        self._say(f"hfopt monitor: {part} is switched off ({why}); training continues")
        if self._then is not None:
            self._then(part)


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
