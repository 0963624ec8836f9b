"""A run in words (a line per epoch, its summary, the report of one run or two), and the series that its page shows.

A run in words: one line for an epoch, a short block for its end, and the same from a log that was read back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hfopt.monitor.diagnose import sentence
from hfopt.monitor.history import History, receipt_lines
from hfopt.monitor.metrics import PREFIX, metrics
from hfopt.monitor.window import merge
from hfopt.schema import Change, Finding, RunDifference, RunMark, RunPoint, RunView, Window
from hfopt.units import format_bytes, format_energy, format_percent, format_rate, format_seconds


def one_line(figures: Mapping[str, float]) -> str:
    """What is known of: pace, utilization, MFU, data wait, memory."""

    def get(name: str) -> float | None:
        return figures.get(PREFIX + name)

    parts: list[str] = []
    if (rate := get("samples_per_s")) is not None:
        parts.append(format_rate(rate, "samples"))
    if (rate := get("tokens_per_s")) is not None:
        parts.append(format_rate(rate, "tokens"))
    if (util := get("gpu_util")) is not None:
        low, high = get("gpu_util_min"), get("gpu_util_max")
        parts.append(f"GPU {util:.0f} %" + (f" ({low:.0f}-{high:.0f})" if low is not None and high is not None else ""))
    if (mfu := get("mfu")) is not None:
        parts.append(f"MFU {format_percent(mfu)}")
    if (wait := get("data_wait")) is not None:
        parts.append(f"data wait {format_percent(wait)}")
    held = [f"{size:.2f} GiB {kind}" for kind in ("allocated", "reserved") if (size := get(f"memory_{kind}_gib")) is not None]
    if held:
        parts.append(f"memory {', '.join(held)}")
    if (energy := get("energy_j")) is not None:
        parts.append(format_energy(energy / 3.6e6))
    if (util := get("gpu_util")) is None and (cpu := get("cpu_util")) is not None:
        parts.append(f"CPU {cpu:.0f} %")
    return ", ".join(parts)


def shares(window: Window) -> dict[str, float]:
    """Where the time went; they add up to 1."""
    phases, total = window.phases, window.phases.total_s
    named = {
        "forward+backward": phases.forward_backward_s,
        "optimizer": phases.optimizer_s,
        "data wait": phases.data_wait_s,
        "evaluation": phases.eval_s,
        "saving": phases.save_s,
        "logging": phases.logging_s,
        "other": phases.other_s,
    }
    return {name: seconds / total for name, seconds in named.items()} if total else {}


def parts(window: Window) -> list[tuple[str, float]]:
    """The shares, the largest first; what is under half a percent is left out."""
    return sorted(((name, share) for name, share in shares(window).items() if share >= 0.005), key=lambda pair: -pair[1])


def final_lines(window: Window, figures: Mapping[str, float], findings: Sequence[Finding], log: Path | None) -> str:
    lines = [
        f"hfopt: {window.steps} steps in {format_seconds(window.seconds)} after the first one: {one_line(figures)}",
        f"hfopt: time: {', '.join(f'{name} {format_percent(share)}' for name, share in parts(window))}",
    ]
    lines += [f"hfopt: {sentence(finding)}" for finding in findings]
    if not findings:
        lines.append("hfopt: nothing found that holds the run back")
    if log is not None:
        lines.append(f"hfopt: log in {log}")
    return "\n".join(lines)


_BAR = 30
_COMPARED: tuple[tuple[str, str, bool | None], ...] = (  # what two runs are compared by, and whether more is better; None: neither
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
    ("gpu_power_w", "power W", None),
    ("cpu_util", "CPU %", None),
)
_SHARES = ("mfu", "data_wait", "eval_share", "save_share", "padding")
NO_WINDOW = "No window was written: the run ended before its first logging step."
_NOT_A_SETTING = ("output_dir", "logging_dir", "run_name", "max_steps")


def report(history: History) -> str:
    return "\n".join(_report(history)) + "\n"


def _report(history: History) -> Iterator[str]:
    total = history.total
    yield f"{history.path.parent}: {run_words(history)}"
    yield ending_words(history)
    if history.earlier_sessions:
        yield f"(the log holds {history.earlier_sessions} earlier session{'s' if history.earlier_sessions > 1 else ''}; this is the last)"
    if total is None:
        yield NO_WINDOW
        return
    yield ""
    yield f"pace    {one_line(history.figures)}"
    yield f"step    {format_seconds(total.step_s or 0.0)} (without logging, evaluation and saving)"
    yield from _time(total)
    yield from _machine(total)
    if history.receipt is not None:
        yield from (f"plan    {line}" for line in receipt_lines(history.receipt, (finding["cause"] for finding in history.findings)))
    yield from _notes(history)


def run_words(history: History) -> str:
    """'BertModel on A10, 2 ranks (transformers 5.22.2, torch 2.15.0)'"""
    head = history.header
    cards = ", ".join(str(gpu.get("name")) for gpu in head.get("gpus", ())) or head.get("device", "unknown device")
    versions = head.get("versions", {})
    ranks = f", {head['world_size']} ranks" if head.get("world_size", 1) > 1 else ""
    software = ", ".join(f"{name} {versions[name]}" for name in ("transformers", "torch") if name in versions)
    return f"{head.get('model')} on {cards}{ranks}" + (f" ({software})" if software else "")


def ending_words(history: History) -> str:
    of = f" of {history.header['max_steps']}" if history.header.get("max_steps") else ""
    if history.finished:
        return f"finished at step {history.summary['step'] if history.summary else 0}{of}"
    if history.interrupted:
        return f"ended by an error or Ctrl-C after step {history.last_step}{of}"
    ago = format_seconds(max(0.0, time.time() - history.last_time))
    return f"no end was written: still running, or killed; last line at step {history.last_step}{of}, {ago} ago"


def _time(total: Window) -> Iterator[str]:
    yield f"time    {format_seconds(total.seconds)} in {total.steps} steps"
    for name, share in parts(total):
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
        workers = f", {total.worker_count} child processes" if total.worker_count else ""
        yield f"CPU     {100 * total.cpu_util.mean:.0f} % ({100 * total.cpu_util.low:.0f}-{100 * total.cpu_util.high:.0f}){workers}"
    if total.ram_used_bytes is not None and total.ram_total_bytes:
        yield f"RAM     {format_bytes(total.ram_used_bytes)} of {format_bytes(total.ram_total_bytes)}, all processes"


def _notes(history: History) -> Iterator[str]:
    yield ""
    if not history.findings:
        yield "Nothing was found that holds the run back."
    for entry in history.findings:
        end = history.end_of(entry)
        yield f"- step {entry['step']}: {sentence(finding_from(entry))}" + (f" [resolved at step {end['step']}]" if end else "")
    if history.fallbacks:
        times = len(history.fallbacks)
        yield f"- ran out of memory {times} time{'s' if times > 1 else ''} and went on in smaller pieces"
    for note in failures(history):
        yield f"- {note}"


def failures(history: History) -> list[str]:
    """The parts of the monitor that switched themselves off."""
    return [f"{part} failed: {why}" for part, why in (history.summary or {}).get("off", {}).items()]


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
    yield f"before  {before.path.parent}: {ending_words(before)}"
    yield f"after   {after.path.parent}: {ending_words(after)}"
    yield ""
    yield f"{'':<20}{'before':>12}{'after':>12}{'change':>14}"
    for row in differences(before, after):
        yield f"{row.what:<20}{row.before:>12}{row.after:>12}{row.change:>14}  {row.verdict}".rstrip()
    changed = differing_settings(before, after)
    if changed:
        yield ""
        yield "settings that differ"
        yield from (f"  {row.what}: {row.before} -> {row.after}" for row in changed)
    yield ""
    yield f"found before: {_causes(before)}"
    yield f"found after:  {_causes(after)}"


def differences(before: History, after: History) -> list[RunDifference]:
    """The figures at least one of the runs has, side by side."""
    rows = []
    for name, title, more_is_better in _COMPARED:
        old, new = before.figures.get(PREFIX + name), after.figures.get(PREFIX + name)
        if old or new:
            share = name in _SHARES
            verdict = _verdict(old, new, more_is_better, least=0.01 if share else 0.05 * abs(old or 0.0))
            change = _change(old, new, share)
            rows.append(RunDifference(what=title, before=_number(old, share), after=_number(new, share), change=change, verdict=verdict))
    return rows


def differing_settings(before: History, after: History) -> list[RunDifference]:
    old, new = before.header.get("config", {}), after.header.get("config", {})
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in _NOT_A_SETTING and old.get(key) != new.get(key)]
    return [RunDifference(what=key, before=str(old.get(key)), after=str(new.get(key))) for key in keys]


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
    return f"{_signed(100 * (new - old))} points" if share else f"{_signed(100 * (new / old - 1))} %"


def _signed(value: float) -> str:
    return f"{value if abs(value) >= 0.05 else 0.0:+.1f}"


def _verdict(old: float | None, new: float | None, more_is_better: bool | None, *, least: float) -> Literal["better", "worse", ""]:
    if old is None or new is None or more_is_better is None or abs(new - old) < least or new == old:
        return ""
    return "better" if (new > old) == more_is_better else "worse"


_MOST_POINTS = 600  # more cannot be told apart on a screen


def view(history: History) -> RunView:
    began_time, total = history.header["time"], history.total
    windows = _thinned(history.windows)
    cards = total.gpus if total is not None else ()
    limits_w = [card.power_limit_w for card in cards if card.power_limit_w]
    return RunView(
        name=str(history.path.parent.parent if history.path.parent.name == "hfopt" else history.path.parent),
        what=run_words(history),
        ending=ending_words(history),
        begin_s=max(0.0, windows[0][0] - began_time - windows[0][1].seconds) if windows else 0.0,
        points=tuple(_point(written - began_time, window) for written, window in windows),
        marks=_marks(history),
        figures=_plain(history.figures),
        card_bytes=min((card.total_bytes for card in cards if card.total_bytes), default=None),
        ram_bytes=total.ram_total_bytes if total is not None else None,
        power_limit_w=sum(limits_w) if limits_w and len(limits_w) == len(cards) else None,
        notes=(*([] if total is not None else [NO_WINDOW]), *failures(history)),
    )


def _thinned(windows: tuple[tuple[float, Window], ...]) -> list[tuple[float, Window]]:
    """Neighbours joined until they are few enough."""
    each = -(-len(windows) // _MOST_POINTS)
    groups = [windows[start : start + each] for start in range(0, len(windows), each)] if windows else []
    return [(group[-1][0], merge([window for _, window in group])) for group in groups]


def _point(until_s: float, window: Window) -> RunPoint:
    return RunPoint(until_s=until_s, last_step=window.last_step, figures=_plain(metrics(window)), shares=shares(window))


def _plain(figures: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix(PREFIX): value for name, value in figures.items()}


def _marks(history: History) -> tuple[RunMark, ...]:
    began_time = history.header["time"]
    found = [_finding(history, entry, began_time) for entry in history.findings]
    found += [_fallback(entry, began_time) for entry in history.fallbacks]
    return tuple(sorted(found, key=lambda mark: mark.at_s))


def _finding(history: History, entry: Mapping[str, Any], began_time: float) -> RunMark:
    """It is reported at the end of the window it showed in, so it began with that window at the latest."""
    own = [(written, window) for written, window in history.windows if window.last_step == entry["step"]]
    began = min((written - window.seconds for written, window in own), default=entry["time"])
    end = history.end_of(entry)
    words = sentence(finding_from(entry)).removeprefix(f"{entry['cause']}: ")
    if end is not None:
        words += f" [resolved at step {end['step']}, after {format_seconds(end['time'] - began)}]"
    step = min((window.first_step for _, window in own), default=entry["step"])
    return RunMark(title=entry["cause"], words=words, step=step, at_s=max(0.0, began - began_time))


def _fallback(entry: Mapping[str, Any], began_time: float) -> RunMark:
    seen, step = entry.get("seen", {}), entry.get("step", {})
    return RunMark(
        title="out of memory",
        words=f"in {seen.get('phase', 'training')} with {seen.get('micro_batch', '?')} samples: {step.get('reason', 'went on')}",
        step=seen["step"] if isinstance(seen.get("step"), int) else 0,
        at_s=entry["time"] - began_time,
    )
