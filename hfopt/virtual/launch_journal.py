"""Reads the journal of a timed rehearsal: optimizer steps of one process, with what each asked of the card in order.

The lines are written by csrc/journal.c and, for operations, phases and steps, by site/hfopt_rehearsal_journal.py. Steps take turns: those
with operations say what the kernels cost, those without what the host's time between launches is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

LAUNCHES = ("kernel", "gemm", "library", "copy", "fill", "nccl")
OUTSIDE = ("evaluation", "saving")
"""Phases that are between two steps and belong to neither. A script without a Trainer has the phases `script` and `optimizer` only: its
backward is what another thread than the main one launches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line, with the phase it happened in. `op` is the operation a launch belongs to; 0: none that is known."""

    kind: str
    visit: int  # how many phases of the step have begun before
    place: int  # how many launches of the visit came before
    spent_s: float  # CPU time of its thread since that thread's last launch or change of phase
    op: int
    stream: str
    fields: tuple[str, ...]
    phase: str

    @property
    def launches(self) -> bool:
        return self.kind in LAUNCHES

    @property
    def ends(self) -> bool:
        """A phase ends with it."""
        return self.kind in ("phase", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """What happened between the ends of two optimizer steps."""

    number: int
    entries: tuple[Entry, ...]
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def with_operations(self) -> bool:
        return self.number % 2 == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessJournal:
    steps: tuple[RecordedStep, ...]
    kernel_names: Mapping[str, str]  # by number


def read_journal(path: Path) -> ProcessJournal:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return _parse(stream)


def _parse(lines: Iterable[str]) -> ProcessJournal:
    steps: list[RecordedStep] = []
    names: dict[str, str] = {}
    entries: list[Entry] | None = None
    phase = ""
    visit = place = 0
    used_ns: dict[str, int] = {}  # by thread, at its last launch or change of phase
    for line in lines:
        if not line.endswith("\n"):
            break  # the process was ended while it wrote
        kind, thread, cpu_ns, op, stream, *fields = line[:-1].split("\t")
        if kind == "name":
            names[fields[0]] = fields[1]
            continue
        if kind == "step":
            visit = place = 0
        entry = Entry(
            kind=kind,
            visit=visit,
            place=place,
            spent_s=1e-9 * (int(cpu_ns) - used_ns.get(thread, int(cpu_ns))),
            op=int(op),
            stream=stream,
            fields=tuple(fields),
            phase=("forward" if thread == "0" else "backward") if phase == "script" else phase,
        )
        if entry.launches or entry.ends:
            used_ns[thread] = int(cpu_ns)
        place += entry.launches
        if kind == "phase":
            phase, visit, place = fields[0], visit + 1, 0
        if kind == "step":
            if entries is not None:
                facts = dict(field.split("=", 1) for field in fields[1:])
                steps.append(RecordedStep(number=int(fields[0]), entries=(*entries, entry), facts=facts))
            entries = [entry]
        elif entries is not None:
            entries.append(entry)
    return ProcessJournal(steps=tuple(steps), kernel_names=names)


def fetch_seconds(folder: Path) -> list[float]:
    """CPU seconds that each batch took in the process that made it."""
    return [float(line) for path in sorted(folder.glob("fetch-*.txt")) for line in path.read_text().splitlines() if line]
