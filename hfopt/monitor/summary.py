"""A run in words: one line for an epoch, a short block for its end, and the same from a log that was read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hfopt.monitor.alarms import sentence
from hfopt.monitor.reporters import PREFIX
from hfopt.schema import Finding, Window
from hfopt.units import format_percent, format_rate, format_seconds


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
        parts.append(f"GPU {util:.0f} % ({get('gpu_util_min'):.0f}-{get('gpu_util_max'):.0f})")
    if (mfu := get("mfu")) is not None:
        parts.append(f"MFU {format_percent(mfu)}")
    if (wait := get("data_wait")) is not None:
        parts.append(f"data wait {format_percent(wait)}")
    if (reserved := get("memory_reserved_gib")) is not None:
        parts.append(f"memory {get('memory_allocated_gib'):.2f} GiB allocated, {reserved:.2f} GiB reserved")
    if (energy := get("energy_j")) is not None:
        parts.append(f"{energy / 3.6e6:.3f} kWh")
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


def closing(window: Window, figures: Mapping[str, float], findings: Sequence[Finding], log: Path | None) -> str:
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
