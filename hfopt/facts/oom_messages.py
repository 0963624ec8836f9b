"""What an out-of-memory message states, however a log broke its lines, and what its figures say of the cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hfopt.facts.oom_forms import Form
from hfopt.schema import MemoryFigures, OomCause
from hfopt.units import GIB, MIB, parse_bytes

SIZE = r"(\d[\d,]*(?:\.\d+)?\s*(?:[KMGTPE]i?B|bytes?|B)\b)"
_XLA_SIZE = r"(\d+(?:\.\d+)?[KMGT])\b"
_PIB = 1 << 50
_FIGURES: Mapping[str, tuple[str, ...]] = {
    "requested": (
        rf"Tried to allocate {SIZE}",
        r"you tried to allocate (\d+ ?bytes)",
        rf"Unable to allocate {SIZE}",
        rf"Requested size: {SIZE}",
        rf"(?:Attempting|trying) to allocate {SIZE}",
        rf"allocating {SIZE}",
        r"Failed to (?:CUDA|HIP) (?:m|c)alloc(?: async| host)? (\d+ ?bytes)",
        r"failed to allocate .{0,20}\((\d+ bytes)\)",
        rf"Invalid buffer size: {SIZE}",
        rf"Requested +: {SIZE}",
        rf"Attempting to (?:reserve|allocate) {_XLA_SIZE}",
    ),
    "total": (
        rf"{SIZE} total capac?i?ty",
        rf"has (?:a )?total (?:capac?i?ty of )?{SIZE}",
        rf"max allowed: {SIZE}",
        rf"Device limit +: {SIZE}",
        rf"Used \S+ of {_XLA_SIZE} hbm",
    ),
    "free": (
        rf"of which {SIZE} (?:is|are) free",
        rf"Free \(according to CUDA\) *: {SIZE}",
        rf"{SIZE} free\b",
        rf"There are {_XLA_SIZE} free",
    ),
    "allocated": (
        rf"{SIZE} already allocated",
        rf"{SIZE} is allocated by PyTorch",
        rf"MPS allocated: {SIZE}",
        rf"Currently allocated +: {SIZE}",
    ),
    "reserved": (rf"{SIZE} reserved in total",),
    "unused": (rf"{SIZE} is reserved by PyTorch but unallocated", rf"{SIZE} cached\b"),  # cached: torch before 1.4
    "process": (rf"this process has {SIZE} memory in use",),
    "limit": (rf"{SIZE} allowed\b", rf"memory_fraction limit.{{0,60}}?limit:? {SIZE}", rf"memory fraction\) *: {SIZE}"),
    "beside": (rf"other allocations: {SIZE}",),  # of this process, by Metal itself
}
_PATTERNS = {name: tuple(re.compile(form, re.IGNORECASE) for form in forms) for name, forms in _FIGURES.items()}
_PROCESS = re.compile(rf"Process (\d+) has {SIZE} memory in use", re.IGNORECASE)
_DEVICE = re.compile(r"\b((?:GPU|NPU|XPU|MLU) ?\d+)\b")
CONTEXT_BYTES = GIB  # of the CUDA context and libraries: at most this is not PyTorch's in a process that trains


def figures_of(text: str) -> MemoryFigures:
    """What a message states, wherever a log broke its lines."""
    best = max((_figures(variant) for variant in _variants(text)), key=_stated)
    return best


def _variants(text: str) -> Iterator[str]:
    """Lines joined as sentences are, and as a terminal breaks them: in the middle of words."""
    yield re.sub(r"\s+", " ", text.replace("\n", " "))
    yield re.sub(r" +", " ", text.replace("\n", ""))


def _stated(figures: MemoryFigures) -> int:
    return sum(
        value is not None
        for value in (figures.requested_bytes, figures.total_bytes, figures.free_bytes, figures.allocated_bytes, figures.reserved_bytes)
    )


def _figures(text: str) -> MemoryFigures:
    found = {name: _first(text, patterns) for name, patterns in _PATTERNS.items()}
    allocated, unused, reserved = found["allocated"], found["unused"], found["reserved"]
    if reserved is None and allocated is not None and unused is not None:
        reserved = allocated + unused
    process = found["process"]
    if found["beside"] is not None and allocated is not None:
        process = allocated + found["beside"]
    listed = _of_others(processes_of(text), reserved, process, found["total"])
    figures = MemoryFigures(
        requested_bytes=found["requested"],
        total_bytes=found["total"],
        free_bytes=found["free"],
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        process_bytes=process,
        others_bytes=listed,
        limit_bytes=found["limit"],
    )
    return _with_rest(figures)


def _of_others(listed: dict[int, int], reserved: int | None, process: int | None, total: int | None) -> int | None:
    """In a container PyTorch does not know its own process in the list: it is the one that holds what was reserved, and its context, or
    one for which there would be no room beside it."""
    if not listed:
        return None
    sizes = sorted(listed.values())
    if process is None and reserved is None and len(sizes) == 1:  # cut before it says what PyTorch holds
        return None
    if process is None and reserved is not None:
        own = next((size for size in sizes if reserved <= size <= reserved + 2 * CONTEXT_BYTES or size + reserved > (total or size)), None)
        if own is not None:
            sizes.remove(own)
    return sum(sizes)


def _with_rest(figures: MemoryFigures) -> MemoryFigures:
    """What is neither free nor this process's belongs to others, less what its context may take."""
    total, free, reserved = figures.total_bytes, figures.free_bytes, figures.reserved_bytes
    if figures.others_bytes is not None or total is None or free is None:
        return figures
    held = figures.process_bytes or (None if reserved is None else reserved + CONTEXT_BYTES)
    if held is None and figures.allocated_bytes is not None:  # what is cached is not stated: a third of the card is more than a cache
        least = figures.allocated_bytes + CONTEXT_BYTES
        held = least if 3 * (total - free - least) >= total else None
    return figures if held is None else MemoryFigures(**{**_fields(figures), "others_bytes": max(0, total - free - held)})


def _fields(figures: MemoryFigures) -> dict[str, int | None]:
    names = (
        "requested_bytes",
        "total_bytes",
        "free_bytes",
        "allocated_bytes",
        "reserved_bytes",
        "process_bytes",
        "others_bytes",
        "limit_bytes",
    )
    return {name: getattr(figures, name) for name in names}


def _first(text: str, patterns: tuple[re.Pattern[str], ...]) -> int | None:
    for pattern in patterns:
        match = pattern.search(text)
        if match is not None and (size := size_of(match[1])) is not None:
            return size
    return None


def size_of(text: str) -> int | None:
    """'2.50 GiB', '0 bytes', '1,024 MB' -> bytes; None for what no machine has."""
    plain = re.sub(r"\s*bytes?$", " b", text.replace(",", "").strip(), flags=re.IGNORECASE)
    unit = plain.split()[-1][:1].lower() if plain.split() else ""
    if unit in ("p", "e"):
        return None
    try:
        size = parse_bytes(plain)
    except ValueError:
        return None
    return size if size < _PIB else None


def processes_of(text: str) -> dict[int, int]:
    """Other processes that a message lists, and what each holds."""
    joined = re.sub(r"\s+", " ", text)
    found = ((int(match[1]), size_of(match[2])) for match in _PROCESS.finditer(joined))
    return {process: size for process, size in found if size is not None}


def device_of(text: str) -> str | None:
    match = _DEVICE.search(text)
    return None if match is None else match[1]


# --------------------------------------------------------------------------------------------------------- cause

PIECES = 0.05  # of the card in unused cache, from which on it is more than rounding
SPARE = 128 * MIB  # a driver cannot give its last pages: what was free must exceed the request by more than that
OTHERS, LISTED = 0.15, 0.05  # of the card with other processes, from which on it is more than a display: by the rest, and by name


def _not_stated(figures: MemoryFigures) -> int:
    """Of a message without what is free (XPU): what PyTorch and a context leave of the card. Taken for full from half of it on."""
    total = figures.total_bytes or 0
    held = next((size for size in (figures.process_bytes, figures.reserved_bytes, figures.allocated_bytes) if size is not None), None)
    return 0 if held is None or 2 * held > total else max(0, total - held - CONTEXT_BYTES)


def cause_of(form: Form, figures: MemoryFigures, *, listed: bool = False) -> OomCause:
    """By what the form says, else by the figures; `listed`: the message names the other processes, so that what they hold is certain."""
    if form.cause is not None and form.cause != "limit":
        return form.cause
    if form.cause == "limit" or figures.limit_bytes is not None:
        return "limit"
    requested, total, free = figures.requested_bytes, figures.total_bytes, figures.free_bytes
    allocated, unused, others = figures.allocated_bytes, figures.unused_bytes or 0, figures.others_bytes or 0
    if total is None:  # XLA states only these two
        return "fragmentation" if requested is not None and free is not None and requested <= free else "device_full"
    if allocated is not None and allocated > 1.02 * total:
        return "spill"
    if requested is not None and requested > total:
        return "one_request"
    if requested is None:
        return "device_full"
    room = free if free is not None else _not_stated(figures)
    if others >= max((LISTED if listed else OTHERS) * total, unused) and others + room >= requested:
        return "other_processes"
    if requested + SPARE <= room:
        return "refused_though_free"
    if unused >= PIECES * total and unused + room >= requested:
        return "fragmentation"
    return "one_request" if requested > total / 2 and requested > (allocated or 0) else "device_full"
