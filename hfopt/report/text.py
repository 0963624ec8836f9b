"""The words that every report of a plan uses, and its details: the parts of speed and memory, who lost and why, advice, notes.

Every line is a (style, text) pair, so that a terminal can colour it and a file gets the bare words. A figure says whether it was predicted
or measured, and on what.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from hfopt.config.yaml_splices import render
from hfopt.schema import (
    REHEARSED_MICRO_BATCHES,
    Assumption,
    Candidate,
    Chosen,
    Correction,
    DataSpec,
    EvaluationPeak,
    MemoryPeak,
    PlanFacts,
    Priced,
    Trial,
)
from hfopt.speed.device_speed import limits, settings_error
from hfopt.units import format_bytes, format_energy, format_percent, format_rate, format_seconds

Line = tuple[str, str]  # style: title, plain, soft, good, bad
COLUMNS = 100  # of a terminal; a longer line is wrapped
RUNNERS_UP = 4
FAILED = ("error", "timeout")  # outcomes of a dry run after which no speed is claimed
REJECTED = 4
TIE = 0.02  # as the search's ranking has it: times closer than this are equal


def detail_lines(facts: PlanFacts) -> Iterator[Line]:
    """What `--verbose` adds to the screen."""
    yield from _engine(facts)
    yield from _speed(facts)
    yield from _memory(facts)
    yield from _others(facts)
    for item in facts.advice:
        yield "title", f"Only you can decide: {item.title}"
        yield "plain", f"  {item.detail}"
        if item.flag:
            yield "good", f"  {item.flag}"
    if facts.notes:
        yield "title", "Notes"
        yield from (("soft", f"  {note}") for note in facts.notes)


def wrapped(style: str, text: str, *, indent: int = 2) -> Iterator[Line]:
    """One line as several, none longer than the screen is wide; `indent` is that of the second and later ones."""
    lead = len(text) - len(text.lstrip())
    hang = " " * max(indent, lead)
    for line in textwrap.wrap(text, width=COLUMNS, subsequent_indent=hang, break_on_hyphens=False, break_long_words=False) or [""]:
        yield style, line


def assumed_lines(assumed: Sequence[Assumption]) -> list[str]:
    """'assumed: head BertForMaskedLM (guess: --task), length 128 tokens, ...', wrapped."""
    return [text for _, text in wrapped("plain", assumed_words(assumed))] if assumed else []


def assumed_words(assumed: Sequence[Assumption]) -> str:
    """A guess with what settles it; what was read stands without."""
    return "assumed: " + ", ".join(_assumption(item) for item in assumed)


def _assumption(item: Assumption) -> str:
    if item.value == "none":
        return f"no {item.what}"
    if item.value is None:
        return f"{item.what} unknown" + (f" ({item.settle})" if item.settle else "")
    return f"{item.what} {item.value}" + (
        f" (guess: {item.settle})" if item.guessed and item.settle else " (guess)" if item.guessed else ""
    )


def device_words(facts: PlanFacts) -> str:
    gpu, host = facts.hardware.smallest, facts.hardware.host
    if gpu is None:
        return f"{host.cpu_name or 'CPU'}, {host.cores:g} cores, {format_bytes(host.ram_free_bytes)} of RAM free"
    count = f"{len(facts.hardware.gpus)} × " if len(facts.hardware.gpus) > 1 else ""
    capability = f", capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else ""
    origin = "not on this machine" if facts.hardware.hypothetical else "on this machine"
    return f"{count}{gpu.name}, {format_bytes(gpu.memory_bytes)}{capability} ({origin})"


def _engine(facts: PlanFacts) -> Iterator[Line]:
    """The engines that were not taken, and every command that starts the one that was."""
    choice = facts.engine
    if choice is None:
        return
    yield "title", f"{choice.name} over {facts.job.world_size} devices"
    for name, why in choice.rejected:
        yield "soft", f"  not {name}: {why}"
    for command in choice.commands:
        yield "good", f"  {command}"


def value_words(value: Any) -> str:
    """As YAML writes it, so that it can be found in the file."""
    return "unset" if value is None else value if isinstance(value, str) else render(value)


def _speed(facts: PlanFacts) -> Iterator[Line]:
    yield "title", "Speed (predicted)"
    for name, chosen in (("before", facts.before), ("after", facts.after)):
        yield "plain", f"  {name:<7} {_speed_words(chosen, facts.job.data)}"
    yield from _range_and_power(facts)
    found = facts.correction
    if found is not None and found.measured_step_s is not None and facts.trial is not None:
        samples = found.candidate.per_device_batch * found.candidate.accumulation
        rate = format_rate(samples / found.measured_step_s, "samples")
        took = format_seconds(found.measured_step_s)
        yield "good", f"  measured on {place_words(facts.trial)}: {took} a step, {rate}"
        yield "soft", f"          predicted {format_seconds(found.predicted_step_s or 0.0)} a step{off_words(found.time_error)}"


def _range_and_power(facts: PlanFacts) -> Iterator[Line]:
    """What the prediction may be off by, what the card draws at what clock, and what the launches were priced for."""
    time = facts.after.time
    if time.rate_error is not None:
        low, high = (format_rate(rate, "samples") for rate in limits(time.samples_per_s, time.rate_error))
        yield (
            "soft",
            f"          8 of 10 such predictions are within {round(100 * time.rate_error)} %: {low.removesuffix(' samples/s')} to {high}",
        )
    if parts := [*_power_parts(facts), *([f"launches priced for {facts.launches}"] if facts.launches else [])]:
        yield "soft", f"          {', '.join(parts)}"


def _power_parts(facts: PlanFacts) -> list[str]:
    """What the card draws at what clock; [] where nothing is known of its power."""
    time, gpu = facts.after.time, facts.hardware.smallest
    if time.power_w is None or time.clock_share is None or gpu is None or gpu.power_limit_w is None:
        return []
    share = round(100 * time.clock_share)
    limited = time.power_w > 0.99 * gpu.power_limit_w and share < 100
    held = f", which holds its clock at {share} % of the boost clock" if limited else ""
    parts = [f"about {time.power_w:.0f} of {gpu.power_limit_w:.0f} W{held}"]
    if facts.job.data.samples:
        seconds = facts.job.data.samples / time.samples_per_s
        energy = format_energy(len(facts.hardware.gpus) * time.power_w * seconds / 3.6e6)
        parts.append(f"{at_most(facts.job.data)}{energy} an epoch")
    return parts


def at_most(data: DataSpec) -> str:
    """A limit on the samples is not their number."""
    return "at most " if data.samples_at_most else ""


def _speed_words(chosen: Chosen, data: DataSpec) -> str:
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
    if data.samples:
        parts.append(f"{at_most(data)}{format_seconds(data.samples / time.samples_per_s)} an epoch")
    if chosen.fault is not None:
        return "cannot run as it is"
    return ", ".join(parts) if chosen.fits else f"does not fit (would be {parts[0]})"


def _memory(facts: PlanFacts) -> Iterator[Line]:
    yield "title", f"Memory (predicted; {format_bytes(facts.budget_bytes)} usable)"
    for name, chosen in (("before", facts.before), ("after", facts.after)):
        memory = chosen.memory
        fits = chosen.fits or chosen.evaluation is not None  # an evaluation that does not fit has its own line
        verdict = "" if fits else ", DOES NOT FIT"
        yield "plain" if fits else "bad", f"  {name:<7} {format_bytes(memory.device_bytes)} at batch {memory.batch}{verdict}"
    yield from _breakdown(facts.after.memory)
    yield from _evaluation(facts)
    yield from _phases(facts)
    if facts.trial is not None:
        yield from _tried(facts.trial, facts.correction)
    else:
        yield "soft", "          not tried on a device"


def _phases(facts: PlanFacts) -> Iterator[Line]:
    """The card's memory over the phases of a step, where vLLM shares it."""
    for phase in facts.phases:
        beside = f"training {format_bytes(phase.training_bytes)}, vLLM {format_bytes(phase.vllm_bytes)}"
        yield "soft", f"          {phase.name:<11} {format_bytes(phase.total_bytes)} on the card: {beside}"


def _evaluation(facts: PlanFacts) -> Iterator[Line]:
    for name, found in (("before", facts.before.evaluation), ("after", facts.after.evaluation)):
        if found is not None and (name == "after" or not found.fits):
            yield "plain" if found.fits else "bad", f"  {name:<7} {evaluation_words(found)}"


def evaluation_words(found: EvaluationPeak) -> str:
    """'first evaluation: 1.20 GiB at batch 16, predictions kept (3.20 MiB a sample), DOES NOT FIT'."""
    parts = [f"first evaluation: {format_bytes(found.memory.allocated_bytes + found.memory.context_bytes)} at batch {found.batch}"]
    if found.keeps_predictions:
        moved = "until the end" if found.accumulation_steps is None else f"for {found.accumulation_steps} batches"
        parts.append(f"predictions kept {moved} ({format_bytes(found.kept_bytes_per_sample)} a sample)")
    return ", ".join([*parts, *([] if found.fits else ["DOES NOT FIT"])])


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


def _tried(trial: Trial, correction: Correction | None) -> Iterator[Line]:
    if trial.outcome != "ok":
        yield "bad", f"  the dry run on {place_words(trial)} {outcome_words(trial)}"
        return
    figures = {"reserved": trial.peak_reserved_bytes, "allocated": trial.peak_allocated_bytes, "on the device": trial.peak_device_bytes}
    words = ", ".join(f"{format_bytes(size)} {name}" for name, size in figures.items() if size is not None)
    how = "rehearsed" if trial.device == "virtual" else "measured"
    yield "good", f"  {how} on {place_words(trial)}: {words}"
    if trial.device == "virtual" and trial.candidate.accumulation > REHEARSED_MICRO_BATCHES:
        yield (
            "soft",
            f"          with {REHEARSED_MICRO_BATCHES} of a step's {trial.candidate.accumulation} micro-batches: later ones repeat",
        )
    if correction is None or correction.predicted_reserved_bytes is None:
        return
    predicted = format_bytes(correction.predicted_reserved_bytes)
    yield "soft", f"          predicted {predicted} reserved{off_words(correction.memory_error)}"


def off_words(error: float | None) -> str:
    """How far a prediction was from the measurement."""
    if error is None:
        return ""
    return f": {format_percent(abs(error))} too {'much' if error > 0 else 'little'}" if abs(error) >= 0.0005 else ": met"


def place_words(trial: Trial) -> str:
    return {"cuda": "this card", "cpu": "this CPU", "virtual": "the virtual GPU"}[trial.device]


def outcome_words(trial: Trial) -> str:
    """How a dry run that did not go well went."""
    if trial.outcome == "timeout":
        return f"ran out of time, so nothing was measured ({trial.message or 'its time limit'})"
    return f"{'ran out of memory' if trial.outcome == 'oom' else 'failed'}: {trial.message or 'no message'}"


def candidate_words(candidate: Candidate, weights_dtype: str | None) -> str:
    parts = [f"{candidate.per_device_batch} × {candidate.accumulation}", candidate.precision_words(weights_dtype)]
    if candidate.checkpointing.on:
        parts.append(candidate.checkpointing.words)
    if candidate.optim:
        parts.append(candidate.optim)
    if candidate.torch_compile:
        parts.append("torch.compile")
    if candidate.use_liger_kernel:
        parts.append("liger")
    if candidate.attn_implementation:
        parts.append(candidate.attn_implementation)
    return " ".join(parts)


def _others(facts: PlanFacts) -> Iterator[Line]:
    runners_up, refused = facts.alternatives[:RUNNERS_UP], facts.rejected[:REJECTED]
    named = [*(other.candidate for other in runners_up), *(rejection.candidate for rejection in refused)]
    width = max((len(candidate_words(candidate, facts.weights_dtype)) for candidate in named), default=0)
    if runners_up:
        yield "title", "Runners-up"
    for other in runners_up:
        yield "plain", f"  {candidate_words(other.candidate, facts.weights_dtype):<{width}}  {why_not(other, facts)}"
    if facts.rejected:
        more = f" ({REJECTED} of {len(facts.rejected)})" if len(facts.rejected) > REJECTED else ""
        yield "title", f"Rejected{more}"
    for rejection in refused:
        yield "plain", f"  {candidate_words(rejection.candidate, facts.weights_dtype):<{width}}  {rejection.reason}"


def why_not(other: Priced, facts: PlanFacts) -> str:
    """In samples per second, as the rates are: both are fed by the same loader."""
    winner = facts.after
    slower = 1 - other.time.samples_per_s / winner.time.samples_per_s
    rate = format_rate(other.time.samples_per_s, "samples")
    if slower <= TIE:
        why = _why_not_equal(other.candidate, winner.candidate)
        return f"{rate}: within {format_percent(TIE)}, which the prediction cannot separate; {why}"
    unsure = ", too close to call" if slower <= settings_error() else ""
    return f"{rate}: {format_percent(slower)} slower{unsure}, {other.time.bound}-bound, {format_bytes(other.memory.device_bytes)}"


def _why_not_equal(other: Candidate, winner: Candidate) -> str:
    """What the order among equals says, in its own order."""
    if other.accumulation > winner.accumulation:
        return "more accumulation steps"
    if other.accumulation < winner.accumulation:
        return "a larger batch, which takes more memory"
    if other.checkpointing.on and not winner.checkpointing.on:
        return "recomputes what fits without"
    return "changes more of the config"
