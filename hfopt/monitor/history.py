"""A run read back from its log: what was found, how fast it went, and its receipt: what the plan predicted beside what was measured.

It is written where the run trained with the planned batch and accumulation, so that one candidate is compared with itself; otherwise the
log says why there is none. A step is the mean over the run, without the first one, logging, evaluation and saving.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfopt.errors import LogError
from hfopt.monitor.log import NAME, check, checked, read
from hfopt.monitor.metrics import PREFIX, metrics
from hfopt.monitor.window import merge
from hfopt.schema import Phases, Window
from hfopt.units import GIB, format_bytes, format_percent, format_rate, format_seconds

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


COLUMNS = (
    "id", "source", "card", "num_gpus", "model", "task", "params/lora details", "per_device_batch", "accumulation", "seq_len", "precision",
    "optimizer", "checkpointing", "attention", "versions/date", "metric_kind", "value", "unit", "ambiguity", "trust",
)  # fmt: skip
"""As benchmarks/data/trainer_runs.csv has them."""
DISTURBANCES = frozenset({"cpu_starved", "throttled", "shared_gpu", "slow_rank"})
"""Findings of what a plan does not predict: they explain a step that took longer."""
_ROWS = (
    ("step_s", "step_seconds", "s/step", 1),
    ("samples_per_s", "samples_per_s", "samples/s", 1),
    ("memory_reserved_gib", "torch_max_reserved", "bytes", GIB),
    ("memory_allocated_gib", "torch_max_allocated", "bytes", GIB),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Predicted and measured; None: not known. `why_not` says why nothing is compared."""

    planned_for: str
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    why_not: str | None = None


def receipt_of(plan: Any, args: Any, figures: Mapping[str, float]) -> Receipt | None:
    """None where the run had no plan."""
    facts = getattr(plan, "facts", None)
    if facts is None:
        return None
    candidate, gpu = facts.after.candidate, facts.hardware.smallest
    planned_for = "the CPU" if gpu is None else gpu.name
    planned = candidate.per_device_batch, candidate.accumulation
    ran = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if planned != ran:
        why_not = f"the plan was for {planned[0]} × {planned[1]}, the run trained with {ran[0]} × {ran[1]}"
        return Receipt(planned_for=planned_for, why_not=why_not)
    reserved_gib = figures.get(f"{PREFIX}memory_reserved_gib")
    return Receipt(
        planned_for=planned_for,
        predicted_step_s=facts.after.time.step_s,
        measured_step_s=figures.get(f"{PREFIX}step_s"),
        predicted_reserved_bytes=facts.after.memory.reserved_bytes if gpu is not None else None,
        measured_reserved_bytes=None if reserved_gib is None else round(reserved_gib * GIB),
    )


def receipt_lines(receipt: Mapping[str, Any] | Receipt, causes: Iterable[str] = ()) -> Iterator[str]:
    """'step: 308.1 ms predicted, 320.0 ms measured (+3.9 %)'; unknown figures are left out. `causes`: of the run's findings."""
    found = asdict(receipt) if isinstance(receipt, Receipt) else receipt
    if found.get("why_not"):
        yield f"not compared: {found['why_not']}"
        return
    disturbed = _disturbed(causes)
    for name, before, after, words in _compared(found):
        why = (
            f"; the run was disturbed ({disturbed}), which no plan predicts"
            if disturbed and words is format_seconds and after > before
            else ""
        )
        yield f"{name}: {words(before)} predicted, {words(after)} measured ({_off(before, after)}){why}"


def _disturbed(causes: Iterable[str]) -> str:
    return ", ".join(sorted(DISTURBANCES.intersection(causes)))


def model_card(history: History) -> str:
    """A section for the model card: how the model was trained, and what had been predicted."""
    head, figures = history.header, history.figures
    config, versions = head.get("config", {}), head.get("versions", {})
    cards = ", ".join(str(gpu.get("name")) for gpu in head.get("gpus", ())) or "CPU"
    batch, accumulation = config.get("per_device_train_batch_size"), config.get("gradient_accumulation_steps")
    lines = ["## Training efficiency", "", f"Trained on {cards}"]
    if batch and accumulation:
        world = head.get("world_size", 1)
        lines[-1] += f" with {batch} samples per device × {accumulation} accumulation × {world} process{'' if world == 1 else 'es'}"
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name in ("torch", "transformers", "hfopt"))
    lines[-1] += f" ({used})." if used else "."
    if (rate := figures.get(f"{PREFIX}samples_per_s")) is not None:
        lines[-1] += f" {format_rate(rate, 'samples')} on average."
    rows = list(_compared(history.receipt or {}))
    if rows:
        lines += ["", "| | predicted by hfopt | measured | off |", "|---|---|---|---|"]
        lines += [f"| {name} | {words(before)} | {words(after)} | {_off(before, after)} |" for name, before, after, words in rows]
        if disturbed := _disturbed(_causes(history)):
            lines += ["", f"The run was disturbed ({disturbed}), which no plan predicts."]
    return "\n".join(lines) + "\n"


def benchmark_rows(history: History) -> str:
    """What the run measured as rows of benchmarks/data/trainer_runs.csv, with its header."""
    head, figures = history.header, history.figures
    config, versions, cards = head.get("config", {}), head.get("versions", {}), head.get("gpus", ())
    day = datetime.fromtimestamp(head["time"], tz=timezone.utc).date().isoformat()
    used = " ".join(f"{name} {version}" for name, version in versions.items() if version)
    common = {
        "source": "hfopt report --rows",
        "card": str(cards[0].get("name")) if cards else str(head.get("device")),
        "num_gpus": head.get("world_size", 1),
        "model": head.get("model"),
        "per_device_batch": config.get("per_device_train_batch_size"),
        "accumulation": config.get("gradient_accumulation_steps"),
        "precision": next((name for name in ("bf16", "fp16", "tf32") if config.get(name)), "float32"),
        "optimizer": config.get("optim"),
        "checkpointing": config.get("gradient_checkpointing"),
        "versions/date": f"{used}, {day}",
        "ambiguity": "the model's id, its sequence length and its attention are not in the log",
        "trust": f"measured by HFGpuMonitor{f', disturbed: {disturbed}' if (disturbed := _disturbed(_causes(history))) else ''}",
    }
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    for name, kind, unit, factor in _ROWS:
        if (value := figures.get(PREFIX + name)) is not None:
            name_of_run = history.path.parent.parent.name
            table.writerow(common | {"id": f"{name_of_run}#{kind}", "metric_kind": kind, "value": value * factor, "unit": unit})
    return out.getvalue()


def _causes(history: History) -> Iterator[str]:
    return (str(finding.get("cause")) for finding in history.findings)


def _compared(found: Mapping[str, Any]) -> Iterator[tuple[str, float, float, Any]]:
    pairs = (
        ("time of a step", "predicted_step_s", "measured_step_s", format_seconds),
        ("memory reserved by torch", "predicted_reserved_bytes", "measured_reserved_bytes", format_bytes),
    )
    for name, before, after, words in pairs:
        if found.get(before) and found.get(after) is not None:
            yield name, found[before], found[after], words


def _off(before: float, after: float) -> str:
    change = after / before - 1
    return f"{'+' if change >= 0 else ''}{format_percent(change)}"
