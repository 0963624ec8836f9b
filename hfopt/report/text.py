"""The plan in words: what changes and why, memory with its parts, speed before and after, who lost and why.

Every line is a (style, text) pair, so that a terminal can colour it and a file gets the bare words. A figure says whether it was predicted
or measured, and on what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hfopt.schema import Candidate, Change, Chosen, MemoryPeak, PlanFacts, Priced, Trial
from hfopt.units import format_bytes, format_percent, format_rate, format_seconds

Line = tuple[str, str]  # style: title, plain, soft, good, bad
RUNNERS_UP = 4
REJECTED = 4


def plan_text(facts: PlanFacts) -> str:
    """Without colours."""
    return "\n".join(text for _, text in plan_lines(facts)) + "\n"


def plan_lines(facts: PlanFacts) -> Iterator[Line]:
    yield from _head(facts)
    yield from _engine(facts)
    yield from _changes(facts.changes)
    yield from _speed(facts)
    yield from _memory(facts)
    yield from _others(facts)
    for item in facts.advice:
        yield "title", f"Only you can: {item.title}"
        yield "plain", f"  {item.detail}"
        if item.flag:
            yield "good", f"  {item.flag}"
    if facts.notes:
        yield "title", "Notes"
        yield from (("soft", f"  {note}") for note in facts.notes)


def device_words(facts: PlanFacts) -> str:
    gpu, host = facts.hardware.smallest, facts.hardware.host
    if gpu is None:
        return f"{host.cpu_name or 'CPU'}, {host.cores:g} cores, {format_bytes(host.ram_free_bytes)} of RAM free"
    count = f"{len(facts.hardware.gpus)} × " if len(facts.hardware.gpus) > 1 else ""
    capability = f", capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else ""
    origin = "named, not here" if facts.hardware.hypothetical else "found here"
    return f"{count}{gpu.name}, {format_bytes(gpu.memory_bytes)}{capability} ({origin})"


def _head(facts: PlanFacts) -> Iterator[Line]:
    yield "title", f"{facts.job.model.name or facts.job.path or 'model'} on {device_words(facts)}"
    was, now = facts.before.candidate, facts.after.candidate
    old, new = facts.job.effective_batch, facts.effective_batch
    world = facts.job.world_size
    same = "the same before and after" if old == new else f"asked for with --effective-batch; it was {old}"
    yield "plain", f"Effective batch {new}, {same}: {_product(was, world)} before, {_product(now, world)} after"


def _engine(facts: PlanFacts) -> Iterator[Line]:
    """How several devices share the model, what was not taken, and how to start it."""
    choice = facts.engine
    if choice is None:
        return
    yield "title", f"{choice.name} over {facts.job.world_size} devices: {choice.reason}"
    for name, why in choice.rejected:
        yield "soft", f"  not {name}: {why}"
    for command in choice.commands:
        yield "good", f"  {command}"


def _product(candidate: Candidate, world: int) -> str:
    ranks = f" × {world}" if world > 1 else ""
    return f"{candidate.per_device_batch} × {candidate.accumulation}{ranks}"


def _changes(changes: Sequence[Change]) -> Iterator[Line]:
    yield "title", f"Changes ({len(changes)})" if changes else "Nothing to change: the config is already the fastest that fits"
    width = max((len(change.key) for change in changes), default=0)
    for change in changes:
        yield "good", f"  {change.key:<{width}}  {value_words(change.before)} → {value_words(change.after)}"
        yield "soft", f"      {change.reason}"


def value_words(value: Any) -> str:
    return {None: "unset", True: "true", False: "false"}.get(value, str(value)) if isinstance(value, (bool, type(None))) else str(value)


def _speed(facts: PlanFacts) -> Iterator[Line]:
    yield "title", "Speed (predicted)"
    for name, chosen in (("before", facts.before), ("after", facts.after)):
        yield "plain", f"  {name:<7} {_speed_words(chosen, facts.job.data.samples)}"
    gain = facts.after.time.samples_per_s / facts.before.time.samples_per_s
    if facts.before.fits:
        yield "good", f"  {gain:.2f} times the throughput"
    if facts.trial is not None and facts.trial.step_s is not None:
        yield "good", f"  measured {format_seconds(facts.trial.step_s)} a step on {place_words(facts.trial)}"


def _speed_words(chosen: Chosen, samples: int | None) -> str:
    time = chosen.time
    parts = [
        format_rate(time.samples_per_s, "samples"),
        f"{format_seconds(time.step_s)} a step",
        f"busy {format_percent(time.gpu_utilization)}",
        f"{time.bound}-bound",
    ]
    if time.tokens_per_s is not None:
        parts.insert(1, format_rate(time.tokens_per_s, "tokens"))
    if time.mfu is not None:
        parts.append(f"MFU {format_percent(time.mfu)}")
    if samples:
        parts.append(f"{format_seconds(samples / time.samples_per_s)} an epoch")
    return ", ".join(parts) if chosen.fits else f"does not fit (would be {parts[0]})"


def _memory(facts: PlanFacts) -> Iterator[Line]:
    yield "title", f"Memory (predicted; {format_bytes(facts.budget_bytes)} may be used)"
    for name, chosen in (("before", facts.before), ("after", facts.after)):
        memory = chosen.memory
        fits = "" if chosen.fits else ", DOES NOT FIT"
        yield "plain" if chosen.fits else "bad", f"  {name:<7} {format_bytes(memory.device_bytes)} at batch {memory.batch}{fits}"
    yield from _breakdown(facts.after.memory)
    if facts.trial is not None:
        yield from _tried(facts.trial)
    else:
        yield "soft", "          not verified on a device"


def _breakdown(memory: MemoryPeak) -> Iterator[Line]:
    parts = memory.breakdown
    if parts is None:
        return
    named = {
        "weights": parts.weights_bytes,
        "gradients": parts.gradients_bytes,
        "optimizer": parts.optimizer_bytes,
        "activations": parts.activations_bytes,
        "logits": parts.logits_bytes,
        "temporaries": parts.temporaries_bytes,
        "fragmentation": parts.fragmentation_bytes,
        "context": parts.context_bytes,
    }
    yield "soft", "          " + ", ".join(f"{name} {format_bytes(size)}" for name, size in named.items() if size)
    if memory.moment:
        yield "soft", f"          the peak is in {memory.moment}"


def _tried(trial: Trial) -> Iterator[Line]:
    if trial.outcome != "ok":
        yield "bad", f"  the dry run on {place_words(trial)} ended with {trial.outcome}: {trial.message or 'no message'}"
        return
    figures = {"reserved": trial.peak_reserved_bytes, "allocated": trial.peak_allocated_bytes, "on the device": trial.peak_device_bytes}
    words = ", ".join(f"{format_bytes(size)} {name}" for name, size in figures.items() if size is not None)
    how = "rehearsed" if trial.device == "virtual" else "measured"
    yield "good", f"  {how} on {place_words(trial)}: {words}"


def place_words(trial: Trial) -> str:
    return {"cuda": "this card", "cpu": "this CPU", "virtual": "the virtual GPU"}[trial.device]


def candidate_words(candidate: Candidate) -> str:
    parts = [f"{candidate.per_device_batch} × {candidate.accumulation}", candidate.precision]
    if candidate.checkpointing.on:
        parts.append(candidate.checkpointing.words)
    if candidate.optim:
        parts.append(candidate.optim)
    if candidate.torch_compile:
        parts.append("torch.compile")
    return " ".join(parts)


def _others(facts: PlanFacts) -> Iterator[Line]:
    if facts.alternatives:
        yield "title", "Runners-up"
    for other in facts.alternatives[:RUNNERS_UP]:
        yield "plain", f"  {candidate_words(other.candidate):<34} {why_not(other, facts)}"
    if facts.rejected:
        more = f" ({REJECTED} of {len(facts.rejected)})" if len(facts.rejected) > REJECTED else ""
        yield "title", f"Rejected{more}"
    for rejection in facts.rejected[:REJECTED]:
        yield "plain", f"  {candidate_words(rejection.candidate):<34} {rejection.reason}"


def why_not(other: Priced, facts: PlanFacts) -> str:
    winner = facts.after
    base = winner.time.step_s * (1 - winner.time.shares.get("input", 0.0))  # without the loader, as the others are priced
    slower = other.time.step_s / base - 1
    rate = format_rate(other.time.samples_per_s, "samples")
    if slower <= 0.01:
        return f"{rate}: as fast within 1 %, but more accumulation, checkpointing or a less even batch"
    return f"{rate}: {format_percent(slower)} slower, {other.time.bound}-bound, {format_bytes(other.memory.device_bytes)}"
