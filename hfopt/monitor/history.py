"""A run read back from its log: what was found, how fast it went, and whether it came to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfopt.errors import LogError
from hfopt.monitor.log import NAME, check, checked, read
from hfopt.monitor.metrics import metrics
from hfopt.monitor.window import merge
from hfopt.schema import Phases, Window

if TYPE_CHECKING:
    from hfopt.schema.run_outputs import FindingEntry, ReceiptEntry, RunOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """The last session of a log. `total` is None if it ended before a window was written."""

    path: Path
    header: Mapping[str, Any]
    windows: tuple[tuple[float, Window], ...]  # with the time each was written
    total: Window | None
    findings: tuple[Mapping[str, Any], ...]
    resolved: tuple[Mapping[str, Any], ...]
    fallbacks: tuple[Mapping[str, Any], ...]
    summary: Mapping[str, Any] | None  # None: still running, killed or interrupted
    interrupted: bool  # an error or Ctrl-C left train()
    last_time: float
    earlier_sessions: int
    receipt: Mapping[str, Any] | None = None  # what a plan had predicted, and what was measured

    @property
    def finished(self) -> bool:
        return self.summary is not None

    def end_of(self, finding: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The entry that says the finding's cause is gone; None: it held to the end."""
        later = (entry for entry in self.resolved if entry["cause"] == finding["cause"] and entry["time"] >= finding["time"])
        return next(later, None)

    @property
    def figures(self) -> dict[str, float]:
        return metrics(self.total) if self.total is not None else {}

    @property
    def last_step(self) -> int:
        return self.total.last_step if self.total is not None else int(self.header.get("first_step", 0))


def newest_run(folder: Path) -> Path:
    """The run below a folder whose log was written last."""
    places = (f"hfopt/{NAME}", f"*/hfopt/{NAME}", f"*/*/hfopt/{NAME}")
    found = [path for place in places for path in folder.glob(place)]
    if not found:
        raise LogError(f"no run with HFGpuMonitor is in {folder}", hint="give the output_dir of the run, or its monitor.jsonl")
    return max(found, key=lambda path: path.stat().st_mtime)


def find_log(run: Path) -> Path:
    """The log of a run: the file itself, or below the folder that was its output_dir or its `output`."""
    for path in (run, run / NAME, run / "hfopt" / NAME):
        if path.is_file():
            return path
    if not run.exists():
        raise LogError(f"there is no {run}", hint="give the output_dir of a run that HFGpuMonitor watched, or its monitor.jsonl")
    others = sorted(str(path.parent) for path in run.glob(f"*/hfopt/{NAME}"))
    hint = f"runs below it: {', '.join(others[:5])}" if others else "was the run started with callbacks=[HFGpuMonitor()]?"
    raise LogError(f"{run} holds no log of HFGpuMonitor ({NAME} or hfopt/{NAME})", hint=hint)


def load(run: Path) -> History:
    path = find_log(run)
    sessions: list[list[dict[str, Any]]] = []
    for entry in read(path):
        if entry["kind"] == "header" and not _rotated_copy(sessions, entry):
            sessions.append([entry])
        elif entry["kind"] != "header" and sessions:
            sessions[-1].append(entry)
    if not sessions:
        raise LogError(f"{path} has no header line, so it is not a log of HFGpuMonitor")
    try:
        for entry in sessions[-1]:
            check(entry)
        return _history(path, sessions[-1], earlier=len(sessions) - 1)
    except (KeyError, TypeError) as error:
        raise LogError(f"{path} was not written by this version of HFGpuMonitor: {error}", hint="or it was changed by hand") from error


def _rotated_copy(sessions: list[list[dict[str, Any]]], header: Mapping[str, Any]) -> bool:
    """A rotated file begins with the header again, down to its time."""
    return bool(sessions) and sessions[-1][0] == header


def _history(path: Path, entries: list[dict[str, Any]], *, earlier: int) -> History:
    def of_kind(kind: str) -> tuple[dict[str, Any], ...]:
        return tuple(entry for entry in entries if entry["kind"] == kind)

    windows = tuple((entry["time"], window_from(entry["window"])) for entry in of_kind("window"))
    summaries, receipts = of_kind("summary"), of_kind("receipt")
    return History(
        path=path,
        header=entries[0],
        windows=windows,
        total=merge([window for _, window in windows]) if windows else None,
        findings=of_kind("finding"),
        resolved=of_kind("resolved"),
        fallbacks=of_kind("fallback"),
        summary=summaries[-1] if summaries else None,
        interrupted=bool(of_kind("interrupted")),
        last_time=entries[-1]["time"],
        earlier_sessions=earlier,
        receipt=receipts[-1] if receipts else None,
    )


def window_from(data: Mapping[str, Any]) -> Window:
    """The inverse of writing a window; fields of a newer version are passed over."""
    window: Window = checked(data, Window, "window")
    return window


def as_json(history: History) -> RunOutput:
    """For programs."""
    return {
        "log": str(history.path),
        "finished": history.finished,
        "interrupted": history.interrupted,
        "last_step": history.last_step,
        "max_steps": history.header.get("max_steps"),
        "steps": history.total.steps if history.total else 0,
        "seconds": history.total.seconds if history.total else 0.0,
        "phases": {one.name: getattr(history.total.phases, one.name) for one in fields(Phases)} if history.total else {},
        "metrics": history.figures,
        "findings": [cast("FindingEntry", finding) for finding in history.findings],
        "resolved": {entry["cause"]: entry["step"] for entry in history.resolved},
        "fallbacks": [dict(entry) for entry in history.fallbacks],
        "config": history.header.get("config", {}),
        "gpus": history.header.get("gpus", []),
        "versions": history.header.get("versions", {}),
        "earlier_sessions": history.earlier_sessions,
        "receipt": _receipt(history),
    }


def _receipt(history: History) -> ReceiptEntry | None:
    if history.receipt is None:
        return None
    return cast("ReceiptEntry", {key: value for key, value in history.receipt.items() if key != "kind"})
