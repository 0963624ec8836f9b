"""Every form in which a log says that memory ran out: who said it, the figures it states, and what they say of the cause.

PyTorch 1.13 to 2.15 (allocators of CUDA, ROCm, XPU, NPU and MPS), the CUDA runtime, cuBLAS and its kin, NCCL, bitsandbytes, vLLM, the C++
and Python heaps, NumPy, the kernel's OOM killer and what schedulers, launchers and shells say of it, PyTorch's DataLoader and Windows.
`facts/oom_errors.py` judges an exception that a program holds; here only its words are there, cut, wrapped and mixed with others'.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hfopt.facts.oom_errors import STICKY, where_in
from hfopt.schema import MemoryFigures, OomCause
from hfopt.units import GIB, KIB, parse_bytes

_S = r"(\d[\d,]*(?:\.\d+)?\s*(?:[KMGTPE]i?B|bytes?|B)\b)"
_PIB = 1 << 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One way to say it. `rank`: which one speaks where several do; `cause` None: the figures say it."""

    source: str
    rank: int
    sign: re.Pattern[str]
    cause: OomCause | None = None
    certain: bool = True


def _form(source: str, rank: int, sign: str, cause: OomCause | None = None, *, certain: bool = True) -> Form:
    return Form(source=source, rank=rank, sign=re.compile(sign, re.IGNORECASE), cause=cause, certain=certain)


FORMS: tuple[Form, ...] = (
    _form("vLLM", 0, r"No available memory for the cache blocks", "kv_cache"),
    _form("vLLM", 0, r"max(?:imum)? (?:seq(?:uence)?|model) len(?:gth)?s? \(?\d+\)?.{0,80}(?:KV cache|stored in)", "kv_cache"),
    _form("vLLM", 0, r"KV cache is needed, which is larger than the available KV cache memory", "kv_cache"),
    _form("vLLM", 0, r"Free memory on device .{0,80}less than desired GPU memory utili[sz]ation", "vllm_share"),
    _form("vLLM", 0, r"Error in memory profiling|out of memory occurred when warming up sampler", "vllm_share"),
    _form("PyTorch", 1, r"Tried to allocate more than 1EB memory", "bad_size"),
    _form("PyTorch", 1, r"per_process_memory_fraction limit|would exceed allowed memory|can NOT allocate memory block with size", "limit"),
    _form("PyTorch", 1, r"(?:CUDA|HIP|XPU|NPU|MLU|MUSA)\s+out of memory\.?\s*Tried to allocate"),
    _form(
        "PyTorch on Apple's Metal",
        1,
        r"MPS backend out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory|Invalid buffer size: .* G",
        None,
    ),
    _form("PyTorch on the CPU", 1, r"DefaultCPUAllocator|CPUAllocator.{0,40}memalign|(?<!MPS )can't allocate memory: you tried", "host"),
    _form("NumPy", 1, r"Unable to allocate .{1,40} for an array|ArrayMemoryError", "host"),
    _form("bitsandbytes", 2, r"Error out of memory at line \d+ in file", "device_full"),
    _form("NCCL", 2, r"(?:NCCL|RCCL).{0,120}out of memory|Failed to (?:CUDA|HIP) (?:m|c)alloc", "communication"),
    _form("NCCL", 2, r"nccl(?:UnhandledCuda|System)Error.{0,200}out of memory|Cuda failure(?: \d+)? 'out of memory'", "communication"),
    _form(
        "cuBLAS", 2, r"(?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(?:Lt)?Create", "library"
    ),
    _form(
        "cuDNN",
        2,
        r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_\w*ALLOCATION_FAILED)|unable to find an engine to execute|valid cuDNN",
        "library",
    ),
    _form(
        "a CUDA library",
        2,
        r"(?:CUSPARSE|CUSOLVER|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED|(?:CU|HIP)FFT_ALLOC_FAILED|miopenStatusAlloc",
        "library",
    ),
    _form("Windows", 2, r"paging file is too small|WinError 1455", "host"),
    _form("pyarrow", 2, r"ArrowMemoryError", "host"),
    _form("the C++ heap", 3, r"std::bad_alloc|\bbad allocation\b", "host"),
    _form("the operating system", 3, r"Cannot allocate memory|unable to mmap \d+ bytes", "host"),
    _form("Python", 3, r"^\s*MemoryError\b|\bMemoryError:?\s*$", "host"),
    _form("accelerate", 5, r"No executable batch size found", "device_full"),
    _form("XLA", 2, r"RESOURCE_EXHAUSTED|PT_DEVMEM Allocation failed|OOM when allocating tensor", None),
    _form(
        "CUDA",
        3,
        r"(?:CUDA|HIP)(?: driver)? error:? ?\d*,? ?out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)",
    ),
    _form("Intel's driver", 3, r"(?:UR_RESULT|PI)_ERROR_OUT_OF_HOST_MEMORY", "host"),
    _form("Intel's driver", 3, r"(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|Allocation is out of device memory"),
    _form("CUDA", 3, r"CUDA ran out of memory"),
    _form("PyTorch", 4, r"(?:CUDA|HIP|XPU|NPU|MLU|MUSA)\s+out of memory|(?:torch\.(?:cuda\.)?|^)OutOfMemoryError\b"),
    _form(
        "the kernel",
        4,
        r"(?:Out of memory|Memory cgroup out of memory):? ?Kill(?:ed)? process \d+|oom-kill:constraint|oom_reaper: reaped",
        "host_killed",
    ),
    _form(
        "the scheduler",
        4,
        r"oom[_-]kill event|OOM[- ]?Killed|Exceeded (?:job|step) memory limit|\bOUT_OF_MEMORY\b|oom_kill"
        r"|srun: error: .{0,80}: Out Of Memory",
        "host_killed",
    ),
    _form(
        "the scheduler",
        4,
        r"exceeded memory limit .{0,60}being killed|PBS: job killed: \w*mem .{0,60}exceeded|TERM_MEMLIMIT",
        "host_killed",
    ),
    _form("ray", 4, r"ray\.exceptions\.OutOfMemoryError|killed due to (?:the node running low on memory|memory pressure)", "host_killed"),
    _form(
        "the notebook",
        4,
        r"crashed after using all available RAM|notebook tried to allocate more memory than is available|kernel (?:appears to have )?died",
        "host_killed",
        certain=False,
    ),
    _form(
        "PyTorch's DataLoader", 4, r"DataLoader worker .{0,40}Bus error|insufficient shared memory|out of shared memory", "shared_memory"
    ),
    _form(
        "PyTorch's DataLoader",
        4,
        r"unable to (?:open shared memory object|write to file </torch)|No space left on device.{0,60}(?:shm|torch_)",
        "shared_memory",
    ),
    _form("PyTorch's DataLoader", 4, r"DataLoader worker \(pid.{0,20}\) is killed by signal: Killed", "host_killed"),
    _form("PyTorch's DataLoader", 5, r"DataLoader worker \(pid.{0,40}\) exited unexpectedly", "host_killed", certain=False),
    _form("datasets", 5, r"subprocesses has abruptly died during map operation", "host_killed", certain=False),
    _form(
        "the launcher",
        6,
        r"exit ?code[:= ]*\(?-9\b|return code = -9|(?:exit|non-zero exit) (?:status|code):? (?:-9|137)\b",
        "host_killed",
        certain=False,
    ),
    _form("the launcher", 6, r"exit ?code[:= ]*\(?-7\b|SIGBUS", "shared_memory", certain=False),
    _form("the launcher", 6, r"SIGKILL|\bsignal 9\b|code 137\b|exitcode[: ]+137\b|Signal Code: Killed", "host_killed", certain=False),
    _form(
        "the shell",
        6,
        r"(?:^\s*(?:\S+: line \d+:\s*)?(?:\[\d+\]\s*[+-]?\s*)?\d*\s*(?:zsh: )?|(?:it/s|s/it)[^\]]{0,80}\]\s*)"
        r"(?:killed\b(?!\s*(?:by|subprocess|process|worker))|已杀死|Getötet|強制終了)",
        "host_killed",
        certain=False,
    ),
    _form("Windows", 7, r"Sysmem Fallback|shared GPU memory", "spill", certain=False),
)
_ANY = re.compile(
    r"[Mm]emory|[Aa]lloc|_STATUS_|Killed|killed|SIGKILL|SIGBUS|signal 9|-[79]|137|bad_alloc|RESOURCE_EXHAUSTED|paging file|1455|oom|OOM"
    r"|cuDNN|DataLoader|KV cache|cache blocks|abruptly|MEMLIMIT|job killed"
    r"|OutOf|OUT_OF_|已杀死|Getötet|強制終了"
    r"|DEVMEM|max seq|model len|Sysmem|mmap|died|available RAM|executable batch|Invalid buffer|engine to execute|FFT_",
)
_NOT_MEMORY = re.compile(
    r"out of resource: shared memory|OutOfResources|CUDA out of memory errors? (?:may|can|might)|to avoid (?:CUDA )?out of memory",
    re.IGNORECASE,
)
_TALKS_OF_IT = re.compile(
    r"^\s*(?:#|//|\"\"\"|except |raise (?!ValueError)|if |elif |import |from |>>> )|torch\.cuda\.OutOfMemoryError\s*as "
    r"|\bif \W{0,3}['\"][^'\"]{0,30}out of memory",
    re.IGNORECASE,
)


def form_of(text: str) -> Form | None:
    """The way in which a line says that memory ran out; None: it does not."""
    if _ANY.search(text) is None or _NOT_MEMORY.search(text) or _TALKS_OF_IT.search(text):
        return None
    return next((form for form in FORMS if form.sign.search(text)), None)


def other_fault(text: str) -> bool:
    """A fault that leaves the device's context broken: what follows it says nothing of memory."""
    return STICKY.search(text) is not None and where_in(text) is None


# --------------------------------------------------------------------------------------------------------- figures

_FIGURES: Mapping[str, tuple[str, ...]] = {
    "requested": (
        rf"Tried to allocate {_S}",
        r"you tried to allocate (\d+ ?bytes)",
        rf"Unable to allocate {_S}",
        rf"Requested size: {_S}",
        rf"(?:Attempting|trying) to allocate {_S}",
        rf"allocating {_S}",
        r"Failed to (?:CUDA|HIP) (?:m|c)alloc(?: async| host)? (\d+ ?bytes)",
        r"failed to allocate .{0,20}\((\d+ bytes)\)",
        rf"Invalid buffer size: {_S}",
    ),
    "total": (rf"{_S} total capac?i?ty", rf"total capac?i?ty of {_S}", rf"max allowed: {_S}"),
    "free": (rf"of which {_S} (?:is|are) free", rf"{_S} free\b"),
    "allocated": (rf"{_S} already allocated", rf"allocated memory {_S} is allocated", rf"MPS allocated: {_S}"),
    "reserved": (rf"{_S} reserved in total", rf"{_S} cached\b"),
    "unused": (rf"{_S} is reserved by PyTorch but unallocated",),
    "process": (rf"this process has {_S} memory in use",),
    "limit": (rf"{_S} allowed\b", rf"memory_fraction limit.{{0,60}}?limit:? {_S}"),
    "beside": (rf"other allocations: {_S}",),  # of this process, by Metal itself
}
_PATTERNS = {name: tuple(re.compile(form, re.IGNORECASE) for form in forms) for name, forms in _FIGURES.items()}
_PROCESS = re.compile(rf"Process (\d+) has {_S} memory in use", re.IGNORECASE)
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
    listed = _of_others(processes_of(text), reserved, process)
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


def _of_others(listed: dict[int, int], reserved: int | None, process: int | None) -> int | None:
    """In a container PyTorch does not know its own process in the list: it is the one that holds what was reserved, and its context."""
    if not listed:
        return None
    sizes = sorted(listed.values())
    if process is None and reserved is not None:
        own = next((size for size in sizes if reserved <= size <= reserved + 2 * CONTEXT_BYTES), None)
        if own is not None:
            sizes.remove(own)
    return sum(sizes)


def _with_rest(figures: MemoryFigures) -> MemoryFigures:
    """What is neither free nor this process's belongs to others, less what its context may take."""
    total, free = figures.total_bytes, figures.free_bytes
    held = figures.process_bytes or (None if figures.reserved_bytes is None else figures.reserved_bytes + CONTEXT_BYTES)
    if figures.others_bytes is not None or total is None or free is None or held is None:
        return figures
    rest = total - free - held
    return MemoryFigures(**{**_fields(figures), "others_bytes": max(0, rest)})


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
ROUNDED = 0.01  # of a figure with two digits behind the point: what was free must exceed the request by more than that
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
    if total is None:
        return "device_full"
    if allocated is not None and allocated > 1.02 * total:
        return "spill"
    if requested is not None and requested > total:
        return "one_request"
    if requested is None:
        return "device_full"
    room = free if free is not None else _not_stated(figures)
    if others >= max((LISTED if listed else OTHERS) * total, unused) and others + room >= requested:
        return "other_processes"
    if requested * (1 + ROUNDED) <= room:
        return "refused_though_free"
    if unused >= PIECES * total and unused + room >= requested:
        return "fragmentation"
    return "one_request" if requested > total / 2 and requested > (allocated or 0) else "device_full"


# --------------------------------------------------------------------------------------------------------- vLLM, the kernel

_VLLM: Mapping[str, str] = {
    "available_bytes": rf"available KV cache memory \({_S}\)",
    "needed_bytes": rf"\(?{_S} KV cache is needed",
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
