"""The receipt of a run: what the plan predicted, and what the run measured: the time of a step, and the memory torch reserved.

It is written where the run trained with the planned batch and accumulation, so that one candidate is compared with itself; otherwise the
log says why there is none. A step is the mean over the run, without the first one, logging, evaluation and saving.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from hfopt.monitor.history import History
from hfopt.monitor.metrics import PREFIX
from hfopt.units import GIB, format_bytes, format_percent, format_rate, format_seconds

COLUMNS = (
    "id", "source", "card", "num_gpus", "model", "task", "params/lora details", "per_device_batch", "accumulation", "seq_len", "precision",
    "optimizer", "checkpointing", "attention", "versions/date", "metric_kind", "value", "unit", "ambiguity", "trust",
)  # fmt: skip
"""As benchmarks/data/trainer_runs.csv has them."""
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


def receipt_lines(receipt: Mapping[str, Any] | Receipt) -> Iterator[str]:
    """'step: 308.1 ms predicted, 320.0 ms measured (+3.9 %)'; what is not known on both sides is left out."""
    found = asdict(receipt) if isinstance(receipt, Receipt) else receipt
    if found.get("why_not"):
        yield f"not compared: {found['why_not']}"
        return
    for name, before, after, words in _compared(found):
        yield f"{name}: {words(before)} predicted, {words(after)} measured ({_off(before, after)})"


def model_card(history: History) -> str:
    """A section for the model card: how the model was trained, and what had been predicted."""
    head, figures = history.header, history.figures
    config, versions = head.get("config", {}), head.get("versions", {})
    cards = ", ".join(str(gpu.get("name")) for gpu in head.get("gpus", ())) or "CPU"
    batch, accumulation = config.get("per_device_train_batch_size"), config.get("gradient_accumulation_steps")
    lines = ["## Training efficiency", "", f"Trained on {cards}"]
    if batch and accumulation:
        lines[-1] += f" with {batch} samples per device × {accumulation} accumulation × {head.get('world_size', 1)} processes"
    used = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name in ("torch", "transformers", "hfopt"))
    lines[-1] += f" ({used})." if used else "."
    if (rate := figures.get(f"{PREFIX}samples_per_s")) is not None:
        lines[-1] += f" {format_rate(rate, 'samples')} on average."
    rows = list(_compared(history.receipt or {}))
    if rows:
        lines += ["", "| | predicted by hfopt | measured | off |", "|---|---|---|---|"]
        lines += [f"| {name} | {words(before)} | {words(after)} | {_off(before, after)} |" for name, before, after, words in rows]
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
        "trust": "measured by HFGpuMonitor",
    }
    out = io.StringIO()
    table = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    for name, kind, unit, factor in _ROWS:
        if (value := figures.get(PREFIX + name)) is not None:
            name_of_run = history.path.parent.parent.name
            table.writerow(common | {"id": f"{name_of_run}#{kind}", "metric_kind": kind, "value": value * factor, "unit": unit})
    return out.getvalue()


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
