"""One error tree: what is reported to the user, and its exit code.

HfoptError                  exit 2   anything below; caught once, in the CLI, and printed without a traceback
├── ConfigError             exit 2   the config cannot be read or does not say enough
├── HardwareError           exit 2   no such card, no such device
├── WorkloadError           exit 2   the model, its task or its batch cannot be built
│   └── UnknownModelError   exit 2   no configuration of that name is to be found
├── TraceError              exit 2   the model cannot be traced: names the op and the line
├── NothingFits             exit 3   no candidate fits the card; carries what would
├── LogError               exit 2   there is no log of a run there, or it says nothing
├── VirtualGpuError         exit 2   the virtual GPU cannot be built or started here
└── DryRunError             exit 4   the dry run failed for a reason other than memory
Exit 1 is not an error: a command that found something (`hfopt check`) ends with it.
"""

from __future__ import annotations

from collections.abc import Callable


class HfoptError(Exception):
    """Something the user can act on. `hint` says how."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(HfoptError):
    pass


class HardwareError(HfoptError):
    pass


class WorkloadError(HfoptError):
    pass


class UnknownModelError(WorkloadError):
    """No configuration of that name is to be found."""


class TraceError(HfoptError):
    pass


class NothingFits(HfoptError):  # noqa: N818 - it is an answer, not a failure
    """`what_would` finds the hint when somebody reads it: pricing remedies takes seconds, and an engine's failure is not the last word."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None, what_would: Callable[[], str] | None = None) -> None:
        self._hint: str | None = hint
        self._what_would = what_would
        super().__init__(message, hint=hint)

    @property
    def hint(self) -> str | None:
        if self._hint is None and self._what_would is not None:
            self._hint = self._what_would()
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        self._hint = hint


class LogError(HfoptError):
    pass


class VirtualGpuError(HfoptError):
    pass


class DryRunError(HfoptError):
    exit_code = 4
