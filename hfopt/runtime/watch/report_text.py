"""The report of a run in words, and of two runs side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from hfopt.runtime.watch import summary
from hfopt.runtime.watch.alarms import sentence
from hfopt.runtime.watch.history import History
from hfopt.runtime.watch.reporters import PREFIX
from hfopt.schema import Change, Finding, Window
from hfopt.units import format_bytes, format_percent, format_seconds

_BAR = 30
_COMPARED = (  # what two runs are compared by, and whether more is better
    ("samples_per_s", "samples/s", True),
    ("tokens_per_s", "tokens/s", True),
    ("step_s", "s per step", False),
    ("mfu", "MFU", True),
    ("gpu_util", "GPU %", True),
    ("data_wait", "data wait", False),
    ("forward_backward_s", "forward+backward s", False),
    ("optimizer_s", "optimizer s", False),
    ("eval_share", "evaluation share", False),
    ("save_share", "saving share", False),
    ("padding", "padding share", False),
    ("memory_reserved_gib", "reserved GiB", False),
    ("memory_allocated_gib", "allocated GiB", False),
    ("gpu_power_w", "power W", False),
    ("cpu_util", "CPU %", False),
)
_SHARES = ("mfu", "data_wait", "eval_share", "save_share", "padding")
_NOT_A_SETTING = ("output_dir", "logging_dir", "run_name", "max_steps")


def report(history: History) -> str:
    return "\n".join(_report(history)) + "\n"


def _report(history: History) -> Iterator[str]:
    head, total = history.header, history.total
    cards = ", ".join(gpu["name"] for gpu in head.get("gpus", ())) or head.get("device", "unknown device")
    versions = head.get("versions", {})
    ranks = f", {head['world_size']} ranks" if head.get("world_size", 1) > 1 else ""
    software = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch") if name in versions)
    yield f"{history.path.parent}: {head.get('model')} on {cards}{ranks} ({software})"
    yield _ending(history)
    if history.earlier_sessions:
        yield f"(the log holds {history.earlier_sessions} earlier session{'s' if history.earlier_sessions > 1 else ''}; this is the last)"
    if total is None:
        yield "No window was written: the run ended before its first logging step."
        return
    yield ""
    yield f"pace    {summary.one_line(history.figures)}"
    yield f"step    {format_seconds(total.step_s or 0.0)} (without logging, evaluation and saving)"
    yield from _time(total)
    yield from _machine(total)
    yield from _notes(history)


def _ending(history: History) -> str:
    of = f" of {history.header['max_steps']}" if history.header.get("max_steps") else ""
    if history.finished:
        return f"finished at step {history.summary['step'] if history.summary else 0}{of}"
    ago = format_seconds(max(0.0, time.time() - history.last_time))
    return f"no end was written: still running, or killed; last line at step {history.last_step}{of}, {ago} ago"


def _time(total: Window) -> Iterator[str]:
    yield f"time    {format_seconds(total.seconds)} in {total.steps} steps"
    for name, share in summary.parts(total):
        yield f"        {name:<17} {format_percent(share):>7}  {'█' * round(_BAR * share)}".rstrip()


def _machine(total: Window) -> Iterator[str]:
    for gpu in total.gpus:
        facts = [f"{100 * gpu.sm_util.mean:.0f} % ({100 * gpu.sm_util.low:.0f}-{100 * gpu.sm_util.high:.0f})" if gpu.sm_util else None]
        if gpu.used_bytes is not None and gpu.total_bytes:
            facts.append(f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.total_bytes)} at its peak")
        facts.append(f"{gpu.power_w.mean:.0f} W of {gpu.power_limit_w:.0f} W" if gpu.power_w and gpu.power_limit_w else None)
        facts.append(f"{gpu.temperature_c.high:.0f} °C at most" if gpu.temperature_c else None)
        facts.append(f"{gpu.suspect} impossible readings left out" if gpu.suspect else None)
        yield f"GPU     {', '.join(fact for fact in facts if fact)}"
    if total.cpu_util is not None:
        workers = f", {total.worker_count} worker processes" if total.worker_count else ""
        yield f"CPU     {100 * total.cpu_util.mean:.0f} % ({100 * total.cpu_util.low:.0f}-{100 * total.cpu_util.high:.0f}){workers}"
    if total.ram_used_bytes is not None and total.ram_total_bytes:
        yield f"RAM     {format_bytes(total.ram_used_bytes)} of {format_bytes(total.ram_total_bytes)}, all processes"


def _notes(history: History) -> Iterator[str]:
    yield ""
    if not history.findings:
        yield "Nothing was found that holds the run back."
    for entry in history.findings:
        step = history.resolved.get(entry["cause"])
        yield f"- step {entry['step']}: {sentence(finding_from(entry))}" + (f" [resolved at step {step}]" if step is not None else "")
    if history.fallbacks:
        yield f"- ran out of memory {len(history.fallbacks)} times and went on in smaller pieces"
    for part, why in (history.summary or {}).get("off", {}).items():
        yield f"- {part} failed: {why}"


def finding_from(entry: Mapping[str, Any]) -> Finding:
    return Finding(
        cause=entry["cause"],
        confidence=entry["confidence"],
        evidence=entry["evidence"],
        message=entry["message"],
        changes=tuple(Change(**change) for change in entry["changes"]),
        predicted_gain=entry["predicted_gain"],
    )


def compare(before: History, after: History) -> str:
    return "\n".join(_compare(before, after)) + "\n"


def _compare(before: History, after: History) -> Iterator[str]:
    yield f"before  {before.path.parent}: {_ending(before)}"
    yield f"after   {after.path.parent}: {_ending(after)}"
    yield ""
    yield f"{'':<20}{'before':>12}{'after':>12}{'change':>14}"
    for name, title, more_is_better in _COMPARED:
        old, new = before.figures.get(PREFIX + name), after.figures.get(PREFIX + name)
        if (old is None and new is None) or (not old and not new):
            continue
        share = name in _SHARES
        change = _change(old, new, share)
        yield f"{title:<20}{_number(old, share):>12}{_number(new, share):>12}{change:>14}{_verdict(old, new, more_is_better)}"
    changed = differing(before.header.get("config", {}), after.header.get("config", {}))
    if changed:
        yield ""
        yield "settings that differ"
        for key, (old, new) in changed.items():
            yield f"  {key}: {old} -> {new}"
    yield ""
    yield f"found before: {_causes(before)}"
    yield f"found after:  {_causes(after)}"


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if key not in _NOT_A_SETTING and before.get(key) != after.get(key)}


def changes(before: History, after: History) -> dict[str, float]:
    """The share by which each metric both runs have went up."""
    old, new = before.figures, after.figures
    return {name: new[name] / old[name] - 1 for name in old if name in new and old[name]}


def _causes(history: History) -> str:
    return ", ".join(dict.fromkeys(entry["cause"] for entry in history.findings)) or "nothing"


def _number(value: float | None, share: bool) -> str:
    if value is None:
        return "-"
    return format_percent(value) if share else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _change(old: float | None, new: float | None, share: bool) -> str:
    if old is None or new is None or not (old or share):
        return ""
    return f"{100 * (new - old):+.1f} points" if share else f"{100 * (new / old - 1):+.1f} %"


def _verdict(old: float | None, new: float | None, more_is_better: bool) -> str:
    if old is None or new is None or abs(new - old) < 0.05 * max(abs(old), 0.02):
        return ""
    return "  better" if (new > old) == more_is_better else "  worse"
