"""What each launch in a journal costs, as the cost model wants it.

A matrix product has the shape of its cuBLAS call; any other kernel has an equal share of the operation that launched it (operations are
costed by `hfopt.trace.op_cost`, in the process itself); an operation that a library did without a launch that could be seen (cuDNN) is one
launch; a kernel outside of all operations is judged by its name and grid.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hfopt.schema import OpCost
from hfopt.virtual.launch_journal import Entry, RecordedStep

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
            cost = _share(own, entry) if own is not None and not own.products else _by_name(entry, kernel_names)
            yield Issue(entry=entry, cost=cost)
        else:
            yield Issue(entry=entry)


def _operations(step: RecordedStep) -> dict[int, _Operation]:
    kernels: Counter[int] = Counter()
    products: Counter[int] = Counter()
    found: dict[int, _Operation] = {}
    for entry in step.entries:
        if entry.kind == "gemm":
            products[entry.op] += 1
        elif entry.launches:
            kernels[entry.op] += 1
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
                kernels=kernels[entry.op],
                products=products[entry.op],
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
    shape = operation.shape if parts == 1 else ()
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
