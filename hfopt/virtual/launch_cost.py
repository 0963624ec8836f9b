"""What a rehearsed step asked of the card, read from its journal and priced: steps, kernels, copies, gaps.

The lines are written by csrc/journal.c and, for operations, phases and steps, by site/hfopt_rehearsal_journal.py. Steps take turns: those
with operations say what the kernels cost, those without what the host's time between launches is.

A matrix product has the shape of its cuBLAS call; any other kernel has an equal share of the operation that launched it (operations are
costed by `hfopt.trace.op_cost`, in the process itself); an operation that a library did without a launch that could be seen (cuDNN) is one
launch; a kernel outside of all operations is judged by its name and grid.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hfopt.schema import OpCost

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


Link = Literal["host", "ranks"]
THREAD_ELEMENTS = 4  # of a thread of an unknown kernel, as in PyTorch's own (ATen/native/cuda/thread_constants.h: thread_work_size)
_DATA_TYPES = {"0": ("float32", 4), "1": ("float64", 8), "2": ("float16", 2), "3": ("int8", 1), "14": ("bfloat16", 2)}
"""cudaDataType of library_types.h: name and bytes."""
_SENT = {"all_reduce": 2.0}
"""Times its buffer that a ring sends (each time less one rank's share); other collectives send it once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Issue:
    """An entry of the journal with its price: a kernel's cost, or bytes over a link."""

    entry: Entry
    cost: OpCost | None = None
    link: Link | None = None
    link_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    kind: str
    dtype: str
    flops: float
    moved_bytes: float
    shape: tuple[int, ...]
    kernels: int  # launches that share its cost
    products: int  # launches that are matrix products of their own
    by_library: bool = False  # then these alone share its cost


def issues(step: RecordedStep, kernel_names: Mapping[str, str]) -> Iterator[Issue]:
    """All that the step asked of the card, in order."""
    operations = _operations(step)
    for entry in step.entries:
        if entry.kind == "op":
            operation = operations[entry.op]
            if not operation.kernels + operation.products and operation.kind != "other":
                yield Issue(entry=entry, cost=_share(operation, entry))
        elif entry.kind == "copy" and "0" in entry.fields[:2]:
            yield Issue(entry=entry, link="host", link_bytes=float(entry.fields[2]))
        elif entry.kind == "nccl":
            yield _collective(entry)
        elif entry.kind == "gemm":
            yield Issue(entry=entry, cost=_product(entry))
        elif entry.launches:
            own = operations.get(entry.op)
            beside = own is not None and (own.products or (own.by_library and entry.kind != "library"))
            cost = _by_name(entry, kernel_names) if own is None or beside else _share(own, entry)
            yield Issue(entry=entry, cost=cost)
        else:
            yield Issue(entry=entry)


def _operations(step: RecordedStep) -> dict[int, _Operation]:
    kernels: Counter[int] = Counter()
    products: Counter[int] = Counter()
    by_library: Counter[int] = Counter()
    found: dict[int, _Operation] = {}
    for entry in step.entries:
        if entry.kind == "gemm":
            products[entry.op] += 1
        elif entry.launches:
            kernels[entry.op] += 1
            by_library[entry.op] += entry.kind == "library"
        elif entry.kind == "op":
            name, kind, dtype, flops, moved, launches, shape = entry.fields
            repeats = int(launches)
            found[entry.op] = _Operation(
                name=name,
                kind=kind,
                dtype=dtype,
                flops=float(flops) * repeats,
                moved_bytes=float(moved) * repeats,
                shape=tuple(map(int, shape.split(","))) if shape else (),
                kernels=by_library[entry.op] or kernels[entry.op],
                products=products[entry.op],
                by_library=bool(by_library[entry.op]),
            )
    return found


def _made(entry: Entry, name: str, kind: str, dtype: str, flops: float, moved_bytes: float, shape: tuple[int, ...] = ()) -> OpCost:
    phase = entry.phase if entry.phase in ("backward", "optimizer") else "forward"
    return OpCost(
        name=name,
        kind=kind,  # type: ignore[arg-type]
        dtype=dtype,
        phase=phase,  # type: ignore[arg-type]
        count=1.0,
        flops_constant=flops,
        flops_slope=0.0,
        bytes_constant=moved_bytes,
        bytes_slope=0.0,
        shape=tuple((size, 0) for size in shape),
    )


def _share(operation: _Operation, entry: Entry) -> OpCost:
    parts = max(operation.kernels, 1)
    shape = operation.shape if parts == 1 or operation.kind == "conv" else ()  # each of a convolution's two gradients has its whole shape
    return _made(entry, operation.name, operation.kind, operation.dtype, operation.flops / parts, operation.moved_bytes / parts, shape)


def _product(entry: Entry) -> OpCost:
    m, n, k, count = map(int, entry.fields[:4])
    dtype, width = _DATA_TYPES.get(entry.fields[4], ("float32", 4))
    moved = width * count * (m * k + k * n + m * n)
    return _made(entry, "gemm", "matmul", dtype, 2.0 * m * n * k * count, float(moved), (m, n, k, count))


def _collective(entry: Entry) -> Issue:
    what, ranks, size = entry.fields[0], int(entry.fields[1]), int(entry.fields[2])
    return Issue(entry=entry, link="ranks", link_bytes=_SENT.get(what, 1.0) * size * (ranks - 1) / ranks)


def _by_name(entry: Entry, kernel_names: Mapping[str, str]) -> OpCost:
    """Copies and fills on the card say their bytes, elementwise kernels their elements; of others only the threads are known."""
    if entry.kind == "copy":
        return _made(entry, "copy", "copy", "uint8", 0.0, 2.0 * int(entry.fields[2]))
    if entry.kind == "fill":
        return _made(entry, "fill", "elementwise", "uint8", 0.0, float(entry.fields[0]))
    name = kernel_names.get(entry.fields[0], "")
    elements, operands = _elements(entry, name), 2
    if found := re.search(r"rrayIPcL[im](\d+)E", name):  # the kernel's array of operands
        operands = int(found[1])
    width = 2 if "BFloat16" in name or "c104Half" in name else 4
    kind = "reduction" if "reduce" in name else "elementwise"
    return _made(entry, "unknown kernel", kind, "float32", 0.0, float(elements * operands * width))


def _elements(entry: Entry, name: str) -> int:
    first = int(entry.fields[3])
    if "elementwise_kernel" in name and first > 0:
        return first
    threads = 1
    for sizes in entry.fields[1:3]:
        for size in sizes.split(","):
            threads *= int(size)
    return threads * THREAD_ELEMENTS


def grouped(found: list[Issue]) -> tuple[OpCost, ...]:
    """Equal kernels once, with how many there are."""
    counts = Counter(issue.cost for issue in found if issue.cost is not None)
    return tuple(replace(cost, count=float(count)) for cost, count in counts.items())
