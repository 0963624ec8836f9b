"""A log with an out-of-memory error in it, read: which of its messages counts, what it states, and what the run was doing.

Of several messages the most detailed one counts: PyTorch's own before a launcher's exit code. Of several runs in one log the last counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hfopt.facts.log_text import LogLine, shown
from hfopt.facts.oom_forms import Form, form_of, other_fault, talks_of_it
from hfopt.facts.oom_messages import SIZE, cause_of, device_of, figures_of, processes_of, size_of
from hfopt.facts.oom_phase import STEP, phase_before
from hfopt.schema import OomPhase, OomReport
from hfopt.units import GIB, KIB

_APART = 500  # lines between two messages, from which on they are of two runs
_LONGEST_MESSAGE = 20_000  # characters: with the processes of eight cards it has some 3,000
_AFTER_MESSAGE = 8  # lines a message may be broken into
_AROUND = 300  # lines in which vLLM states its figures
_BATCH = re.compile(r"(?:Instantaneous batch size per device|per_device_train_batch_size|micro_batch_size)\W{1,4}(\d+)")
_ACCUMULATION = re.compile(r"(?:Gradient Accumulation steps|gradient_accumulation_steps)\W{1,4}(\d+)")
_ENDS_MESSAGE = re.compile(r'^\s*$|Traceback \(most|^\s*File "|^\s*\{.?loss|^\s*(?:srun|wandb|ERROR:|WARNING:|E\d{4})')
_PINNED, _PINNING = re.compile(r"\.pin_memory\(|cudaHostAlloc|cudaHostRegister"), 4  # in the frame right above a message
_TRAINED, _LOSS, _LOSSES = re.compile(r"train_runtime"), re.compile(r"\bloss['\"]?\s*[:=]\s*\d", re.IGNORECASE), 3  # behind a message
_OTHER_BARS = re.compile(  # of what is no step of a training
    r"shards|weights|Map\b|Filter|Fetching|Download|tokeniz|Pack|Convert|Apply|Truncat|Adding|Generat|Load|Cach|Quantiz|Extract|Sav|Evaluat"
    r"|Predict|example|sample|token|file|split|prompts|Captur|Materializ",
    re.IGNORECASE,
)
_VLLM_PHASES: frozenset[str] = frozenset({"kv_cache", "vllm_share"})


def read_oom(lines: Sequence[LogLine]) -> OomReport | None:
    """The shortage that ended the last run in the log; None: there is none, or another fault came first."""
    hits = _hits(lines)
    if not hits:
        return None
    index, form = min(hits, key=lambda hit: (hit[1].rank, hit[0]))
    if form.rank >= 3 and form.cause is None and any(other_fault(line.text) for line in lines[max(0, index - _APART) : index + 1]):
        return None
    if form.source == "CUDA" and any(_PINNED.search(line.text) for line in lines[max(0, index - _PINNING) : index]):
        form = replace(form, cause="host")  # page-locked memory is the host's, whatever the runtime calls it
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
        went_on=_went_on(lines[hits[-1][0] + 1 :], lines[index].rank),
        processes=processes_of(message),
        vllm=vllm_of("\n".join(line.text for line in lines[max(0, index - _AROUND) : index + _AFTER_MESSAGE]))
        if form.source == "vLLM"
        else {},
    )


def fault_beside_memory(lines: Sequence[LogLine]) -> str | None:
    """The fault that the log does show, where it is not memory."""
    found = next((line.text for line in lines if other_fault(line.text)), None)
    return None if found is None else shown(found, 200)


def _hits(lines: Sequence[LogLine]) -> list[tuple[int, Form]]:
    """Of the last run, in order: from the log's end back to where none was found for `_APART` lines."""
    hits: list[tuple[int, Form]] = []
    for index in range(len(lines) - 1, -1, -1):
        if hits and hits[-1][0] - index > _APART:
            break
        if (form := form_of(lines[index].text)) is not None:
            hits.append((index, form))
    if hits:
        return hits[::-1]
    joined = ((index, form_of(line.text + after.text.lstrip()), (line, after)) for index, (line, after) in enumerate(pairwise(lines)))
    return [(index, form) for index, form, pair in joined if form is not None and not any(talks_of_it(line.text) for line in pair)]


def _message(lines: Sequence[LogLine], index: int) -> str:
    """The line and what it goes on with, of the same rank."""
    found = [lines[index].text]
    for line in lines[index + 1 : index + 1 + 4 * _AFTER_MESSAGE]:
        if line.rank is not None and lines[index].rank is not None and line.rank != lines[index].rank:
            continue
        if len(found) > _AFTER_MESSAGE or _ENDS_MESSAGE.search(line.text):
            break
        found.append(line.text)
    return "\n".join(found)[:_LONGEST_MESSAGE]


def _phase(lines: Sequence[LogLine], index: int, form: Form, message: str) -> tuple[OomPhase, str | None]:
    if form.cause in _VLLM_PHASES:
        return "vllm_start", None
    if form.source == "PyTorch's DataLoader":
        return "data", None
    if form.source == "pyarrow":
        return "data", "pyarrow, which datasets reads and writes with"
    if "cumem_allocator" in message:
        return "generation", "vLLM's sleep mode (cumem_allocator) takes its memory back before it generates"
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


def _went_on(after: Sequence[LogLine], rank: int | None) -> bool:
    """The run trained on behind its last message: losses of the rank that ran out, or the end of a training."""
    own = [line.text for line in after if line.rank in (rank, None)]
    return any(map(_TRAINED.search, own)) or sum(_LOSS.search(text) is not None for text in own) >= _LOSSES


def _last_step(lines: Sequence[LogLine]) -> int | None:
    for line in reversed(lines[-400:]):
        found = None if _OTHER_BARS.search(line.text) else STEP.search(line.text)
        if found is not None:
            return int(found[1])
    return None


# --------------------------------------------------------------------------------------------------------- vLLM, the kernel

_VLLM: Mapping[str, str] = {
    "available_bytes": rf"available KV cache memory \({SIZE}\)",
    "needed_bytes": rf"\(?{SIZE} KV cache is needed",
    "free_bytes": r"Free memory on device \S* ?\((\d+(?:\.\d+)?)/",
    "total_bytes": r"Free memory on device \S* ?\(\d+(?:\.\d+)?/(\d+(?:\.\d+)?) ?GiB\)",
    "share": r"(?:desired GPU memory utili[sz]ation \(|gpu_memory_utili[sz]ation \()(\d?\.\d+)",
    "wanted_bytes": r"desired GPU memory utili[sz]ation \(\d?\.\d+, (\d+(?:\.\d+)?) ?GiB",
    "weights_bytes": r"model weights take (\d+(?:\.\d+)?) ?Gi?B",
    "peak_bytes": r"activation peak memory takes (\d+(?:\.\d+)?) ?Gi?B",
    "card_bytes": r"total_gpu_memory \((\d+(?:\.\d+)?) ?GiB\)",
    "max_length": r"max(?:imum)? (?:seq(?:uence)?|model) len(?:gth)? \((\d+)\)",
    "storable": r"stored in KV cache \((\d+)\)",
    "estimated_length": r"estimated maximum model length is (\d+)",
}


def vllm_of(text: str) -> dict[str, float]:
    """What vLLM's own lines state; sizes in bytes."""
    joined = re.sub(r"\s+", " ", text)
    found: dict[str, float] = {}
    for name, pattern in _VLLM.items():
        match = re.search(pattern, joined, re.IGNORECASE)
        if match is None:
            continue
        if name.endswith("_bytes"):
            size = size_of(match[1]) if re.search(r"[A-Za-z]", match[1]) else int(float(match[1]) * GIB)
            found |= {} if size is None else {name: float(size)}
        else:
            found[name] = float(match[1])
    return found


_RSS = re.compile(r"anon-rss:(\d+)kB")


def killed_bytes(text: str) -> int | None:
    """What a process held when the kernel ended it."""
    match = _RSS.search(text)
    return None if match is None else int(match[1]) * KIB
