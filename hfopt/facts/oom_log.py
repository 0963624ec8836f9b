"""A log with an out-of-memory error in it, read: which message counts, what it states, and what the lines around it say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hfopt.facts.log_text import LogLine, shown
from hfopt.facts.oom_messages import Form, cause_of, device_of, figures_of, form_of, killed_bytes, other_fault, processes_of, vllm_of
from hfopt.facts.oom_phases import phase_before
from hfopt.schema import OomPhase, OomReport

_APART = 500  # lines between two messages, from which on they are of two runs
_AFTER = 8  # lines a message may be broken into
_AROUND = 300  # lines in which vLLM states its figures
_BATCH = re.compile(r"(?:Instantaneous batch size per device|per_device_train_batch_size|micro_batch_size)\W{1,4}(\d+)")
_ACCUMULATION = re.compile(r"(?:Gradient Accumulation steps|gradient_accumulation_steps)\W{1,4}(\d+)")
_STEP = re.compile(r"(\d+)/\d+ \[[\d:]+<")
_ENDS_MESSAGE = re.compile(r'^\s*$|Traceback \(most|^\s*File "|^\s*(?:srun|wandb|ERROR:|WARNING:|E\d{4})')
_VLLM_PHASES: frozenset[str] = frozenset({"kv_cache", "vllm_share"})


def read_oom(lines: Sequence[LogLine]) -> OomReport | None:
    """The shortage that ended the last run in the log; None: there is none, or another fault came first."""
    hits = _last_run(_hits(lines))
    if not hits:
        return None
    index, form = min(hits, key=lambda hit: (hit[1].rank, hit[0]))
    if form.rank >= 3 and form.cause is None and any(other_fault(line.text) for line in lines[max(0, index - _APART) : index + 1]):
        return None
    message = _message(lines, index)
    figures = figures_of(message)
    if form.cause == "host_killed" and (held := killed_bytes(message)) is not None:
        figures = replace(figures, process_bytes=held)
    phase, evidence = _phase(lines, index, form, message)
    before = lines[: index + 1]
    return OomReport(
        source=form.source,
        cause=cause_of(form, figures, listed=bool(processes_of(message))),
        phase=phase,
        figures=figures,
        line=lines[index].number,
        text=shown(message.replace("\n", " "), 600),
        certain=form.certain,
        evidence=None if evidence is None else shown(evidence, 160),
        device=device_of(message),
        ranks=tuple(sorted({rank for at, one in hits if one.source == form.source and (rank := lines[at].rank) is not None})),
        batch=_stated(before, _BATCH),
        accumulation=_stated(before, _ACCUMULATION),
        step=_last_step(before),
        processes=processes_of(message),
        vllm=vllm_of("\n".join(line.text for line in lines[max(0, index - _AROUND) : index + _AFTER])) if form.source == "vLLM" else {},
    )


def fault_beside_memory(lines: Sequence[LogLine]) -> str | None:
    """The fault that the log does show, where it is not memory."""
    found = next((line.text for line in lines if other_fault(line.text)), None)
    return None if found is None else shown(found, 200)


def _hits(lines: Sequence[LogLine]) -> list[tuple[int, Form]]:
    hits = [(index, form) for index, line in enumerate(lines) if (form := form_of(line.text)) is not None]
    if hits:
        return hits
    pairs = enumerate(pairwise(lines))  # a terminal may have broken the message's own line
    return [(index, form) for index, (line, following) in pairs if (form := form_of(line.text + following.text.lstrip())) is not None]


def _last_run(hits: list[tuple[int, Form]]) -> list[tuple[int, Form]]:
    for at in range(len(hits) - 1, 0, -1):
        if hits[at][0] - hits[at - 1][0] > _APART:
            return hits[at:]
    return hits


def _message(lines: Sequence[LogLine], index: int) -> str:
    """The line and what it goes on with, of the same rank."""
    found = [lines[index].text]
    for line in lines[index + 1 : index + 1 + 4 * _AFTER]:
        if line.rank is not None and lines[index].rank is not None and line.rank != lines[index].rank:
            continue
        if len(found) > _AFTER or _ENDS_MESSAGE.search(line.text):
            break
        found.append(line.text)
    return "\n".join(found)


def _phase(lines: Sequence[LogLine], index: int, form: Form, message: str) -> tuple[OomPhase, str | None]:
    if form.cause in _VLLM_PHASES:
        return "vllm_start", None
    if form.source == "PyTorch's DataLoader":
        return "data", None
    if "Failed to clone() tensor" in message:
        return "saving", "state_dict of FSDP"
    phase, evidence = phase_before(lines, index)
    if form.source == "bitsandbytes" and phase in ("unknown", "forward") and "pythonInterface" in message:
        return "optimizer", "bitsandbytes keeps paged states in managed memory (pythonInterface.c)"
    if form.cause == "communication" and phase in ("unknown", "forward", "data"):
        return "communication", evidence
    return phase, evidence


def _stated(lines: Sequence[LogLine], pattern: re.Pattern[str]) -> int | None:
    for line in reversed(lines):
        match = pattern.search(line.text)
        if match is not None:
            return int(match[1]) if 0 < int(match[1]) < 1 << 20 else None
    return None


def _last_step(lines: Sequence[LogLine]) -> int | None:
    for line in reversed(lines[-400:]):
        found = None if re.search(r"shards|Map|Filter|Fetching|Download", line.text) else _STEP.search(line.text)
        if found is not None:
            return int(found[1])
    return None
