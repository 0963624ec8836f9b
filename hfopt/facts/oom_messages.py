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
from hfopt.units import GIB, MIB, parse_bytes

SIZE = r"(\d[\d,]*(?:\.\d+)?\s*(?:[KMGTPE]i?B|bytes?|B)\b)"
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


_DEVICES = r"(?:CUDA|HIP|XPU|NPU|MLU|MUSA|SDAA)"
_KILLED = r"(?:-9|137)\b"

FORMS: tuple[Form, ...] = (
    _form("vLLM", 0, r"No available memory for the cache blocks", "kv_cache"),
    _form("vLLM", 0, r"max(?:imum)? (?:seq(?:uence)?|model) len(?:gth)?s? \(?\d+\)?.{0,80}(?:KV cache|stored in)", "kv_cache"),
    _form("vLLM", 0, r"KV cache is needed, which is larger than the available KV cache memory", "kv_cache"),
    _form("SGLang", 0, r"Not enough memory\. Please try to increase --mem-fraction-static", "kv_cache"),
    _form("vLLM", 0, r"Free memory on device .{0,80}less than desired GPU memory utili[sz]ation", "vllm_share"),
    _form("vLLM", 0, r"Error in memory profiling|out of memory occurred when warming up sampler", "vllm_share"),
    _form("PyTorch", 1, r"Tried to allocate more than 1EB memory", "bad_size"),
    _form("PyTorch", 1, r"per_process_memory_fraction limit|can NOT allocate memory block with size", "limit"),
    _form("PyTorch", 1, r"Allocation on device.{0,20}would exceed allowed memory"),
    _form("PyTorch", 1, rf"{_DEVICES}\s+out of (?:the )?memory\.?\s*Tried to allocate|OutOfMemoryError: Tried to allocate"),
    _form(
        "PyTorch on Apple's Metal", 1, r"MPS backend out of memory|kIOGPUCommandBufferCallbackErrorOutOfMemory|Invalid buffer size: .* G"
    ),
    _form("MLX", 1, r"\[metal::malloc\].{0,80}maximum allowed buffer size", "one_request"),
    _form("PyTorch on the CPU", 1, r"DefaultCPUAllocator|CPUAllocator.{0,40}memalign|(?<!MPS )can't allocate memory: you tried", "host"),
    _form("NumPy", 1, r"Unable to allocate .{1,40} for an array|ArrayMemoryError", "host"),
    _form("bitsandbytes", 2, r"Error out of memory at line \d+ in file", "device_full"),
    _form("NCCL", 2, r"(?:NCCL|RCCL).{0,120}out of memory|Failed to (?:CUDA|HIP) (?:m|c)alloc", "communication"),
    _form("NCCL", 2, r"nccl(?:UnhandledCuda|System)Error.{0,200}out of memory|Cuda failure(?: \d+)? 'out of memory'", "communication"),
    _form("cuBLAS", 2, r"(?:CU|HIP)BLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling `cublas(?:Lt)?Create", "library"),
    _form("cuDNN", 2, r"CUDNN_STATUS_(?:ALLOC_FAILED|INTERNAL_ERROR_\w*ALLOCATION_FAILED)|unable to find an engine to execute", "library"),
    _form("cuDNN", 2, r"Unable to find a valid cuDNN", "library"),
    _form("a CUDA library", 2, r"(?:CUSPARSE|CUSOLVER|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED|(?:CU|HIP)FFT_ALLOC_FAILED", "library"),
    _form("a CUDA library", 2, r"miopenStatusAlloc|rocblas_status_memory_error", "library"),
    _form("Windows", 2, r"paging file is too small|WinError 1455|os error 1455", "host"),
    _form("pyarrow", 2, r"ArrowMemoryError", "host"),
    _form("the C++ heap", 3, r"std::bad_alloc|\bbad allocation\b", "host"),
    _form("the Rust heap", 3, r"memory allocation of \d+ bytes failed", "host"),
    _form("the operating system", 3, r"Cannot allocate memory|unable to mmap \d+ bytes", "host"),
    _form("Python", 3, r"^\s*MemoryError\b|\bMemoryError:?\s*$", "host"),
    _form("accelerate", 5, r"No executable batch size found", "device_full"),
    _form("TensorFlow", 1, r"OOM when allocating tensor.{0,200}by allocator (?:mkl)?_?cpu", "host"),
    _form(
        "XLA",
        2,
        r"RESOURCE_EXHAUSTED|PT_DEVMEM Allocation failed|OOM when allocating tensor|Ran out of memory in memory space hbm"
        r"|failed to allocate .{0,60}from device",
    ),
    _form(
        "CUDA",
        3,
        r"(?:CUDA|HIP)(?: driver| runtime)? error:? ?\(?\d*\)?,? ?:? ?out of memory|CUDA_ERROR_OUT_OF_MEMORY"
        r"|(?:cuda|hip)Error(?:MemoryAllocation|OutOfMemory)|HIP_ERROR_OutOfMemory|(?:cuda|hip)Malloc\w* failed: out of memory",
    ),
    _form("Intel's driver", 3, r"(?:UR_RESULT|PI)_ERROR_OUT_OF_HOST_MEMORY", "host"),
    _form("Intel's driver", 3, r"(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|Allocation is out of device memory"),
    _form("ROCm", 3, r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
    _form("CUDA", 3, r"CUDA ran out of memory|CUDA failed with error out of memory|Failed to allocate memory for requested buffer of size"),
    _form("PyTorch", 3, r"Tried to allocate .{1,20}GPU \d+ has a total capac|NVML_SUCCESS == r INTERNAL ASSERT FAILED"),
    _form(
        "PyTorch",
        4,
        rf"{_DEVICES}\s+out of (?:the )?memory|(?:torch\.(?:cuda\.)?|^)OutOfMemoryError\b"
        r"|(?<!java\.lang\.)(?<!ray\.exceptions\.)\bOutOfMemoryError: ",
    ),
    _form("the kernel", 4, r"[Oo]ut of memory:? ?Kill(?:ed)? process \d+|oom-kill:constraint|oom_reaper: reaped", "host_killed"),
    _form("the kernel", 4, r"invoked oom-killer|killed by (?:the )?OOM[- ]killer|systemd-oomd.{0,40}killed|OOMKilling", "host_killed"),
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
    _form("the notebook", 5, r"DeadKernelError|The Kernel crashed while executing code", "host_killed", certain=False),
    _form("PyTorch's DataLoader", 4, r"DataLoader worker \(pid.{0,20}\) is killed by signal: Killed", "host_killed"),
    _form("PyTorch's DataLoader", 4, r"DataLoader worker .{0,40}Bus error", "shared_memory"),
    _form("PyTorch's DataLoader", 5, r"insufficient shared memory|(?<!resource: )out of shared memory", "shared_memory"),
    _form(
        "PyTorch's DataLoader",
        4,
        r"unable to (?:open shared memory object|write to file </torch)|No space left on device.{0,60}(?:shm|torch_)",
        "shared_memory",
    ),
    _form("PyTorch's DataLoader", 5, r"DataLoader worker \(pid.{0,40}\) exited unexpectedly", "host_killed", certain=False),
    _form("datasets", 5, r"subprocesses has abruptly died during map operation", "host_killed", certain=False),
    _form(
        "a process pool",
        5,
        r"process pool was terminated abruptly|causing the Operating System to kill the worker",
        "host_killed",
        certain=False,
    ),
    _form(
        "the launcher",
        6,
        rf"exit ?code\s*[:= ]*\(?-9\b|return code = -9|(?:exit|non-zero exit) (?:status|code):? {_KILLED}"
        rf"|exited (?:with )?(?:code )?\(?{_KILLED}|non-zero code: {_KILLED}|status=9/KILL",
        "host_killed",
        certain=False,
    ),
    _form("the launcher", 6, r"exit ?code\s*[:= ]*\(?-7\b|SIGBUS", "shared_memory", certain=False),
    _form("the launcher", 6, r"SIGKILL|\bsignal:? 9\b|code 137\b|exitcode[: ]+137\b|Signal Code: Killed", "host_killed", certain=False),
    _form(
        "the shell",
        6,
        r"(?:^\s*[`*]{0,3}(?:\S+: line \d+:\s*)?(?:\[\d+\]\s*[+-]?\s*)?\d*\s*(?:zsh: )?|(?:it/s|s/it)[^\]]{0,80}\]\s*)"
        r"(?:killed\b(?!\s*(?:by|subprocess|process|worker))|已杀死|Getötet|強制終了)",
        "host_killed",
        certain=False,
    ),
    _form("PyTorch", 7, r"\bTried to allocate \d[\d.]* ?[KMG]i?B\b"),
    _form("the C++ heap", 7, r"virtual memory exhausted|out of memory, malloc failed", "host"),
    _form("CUDA", 8, r"(?:CUDA|GPU|HIP|VRAM|CU\w+|error|fail\w*|exception)\b.{0,60}\bout of memory\b", certain=False),
    _form("Windows", 7, r"Sysmem Fallback|shared GPU memory", "spill", certain=False),
)
_ANY = re.compile(
    r"memor|alloc|_status_|kill|sigbus|signal 9|-[79]|137|resource|1455|oom|cudnn|dataloader|kv cache|cache blocks|abruptly|outof|out_of"
    r"|已杀死|getötet|強制終了|memlimit|max seq|model len|sysmem|mmap|died|crash|available ram|executable batch|invalid buffer"
    r"|engine to execute|fft_|paging file|nvml_success|kernelerror",
    re.IGNORECASE,
)
_NOT_MEMORY = re.compile(
    r"out of resource: |OutOfResources|LaunchOutOfResources|CUDA out of memory errors? (?:may|can|might)|to avoid (?:CUDA )?out of memory"
    r"|\b(?:if|avoid|prevent|may|might|could|can|reduce|without|risk)\W+(?:\w+\W+){0,5}out.of.memory",
    re.IGNORECASE,
)
_TALKS_OF_IT = re.compile(  # code, or a change to it
    r"^\s*[+-]?\s*(?:#|//|\"\"\"|except |raise (?!ValueError)|if |elif |import |from |assert |def |class |>>> )"
    r"|^\s*[+-]?\s*(?:logger|logging|log|print|warnings)[.\w]*\("
    r"|\b(?!\w*(?:Error|Exception)\b)\w+\(f?['\"][^'\"]{0,40}out of memory|torch\.cuda\.OutOfMemoryError\s*as "
    r"|\bif \W{0,3}['\"][^'\"]{0,30}out of memory",
    re.IGNORECASE,
)


def talks_of_it(text: str) -> bool:
    """A line of code that handles such an error."""
    return _TALKS_OF_IT.search(text) is not None


def form_of(text: str) -> Form | None:
    """The way in which a line says that memory ran out; None: it does not."""
    if _ANY.search(text) is None or _NOT_MEMORY.search(text) or talks_of_it(text):
        return None
    return next((form for form in FORMS if form.sign.search(text)), None)


def other_fault(text: str) -> bool:
    """A fault that leaves the device's context broken: what follows it says nothing of memory."""
    return STICKY.search(text) is not None and where_in(text) is None


# --------------------------------------------------------------------------------------------------------- figures

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
    ),
    "total": (
        rf"{SIZE} total capac?i?ty",
        rf"has (?:a )?total (?:capac?i?ty of )?{SIZE}",
        rf"max allowed: {SIZE}",
        rf"Device limit +: {SIZE}",
    ),
    "free": (rf"of which {SIZE} (?:is|are) free", rf"Free \(according to CUDA\) *: {SIZE}", rf"{SIZE} free\b"),
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
    if process is None and reserved is None and len(sizes) == 1:  # cut before it says what PyTorch holds
        return None
    if process is None and reserved is not None:
        own = next((size for size in sizes if reserved <= size <= reserved + 2 * CONTEXT_BYTES), None)
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
    if requested + SPARE <= room:
        return "refused_though_free"
    if unused >= PIECES * total and unused + room >= requested:
        return "fragmentation"
    return "one_request" if requested > total / 2 and requested > (allocated or 0) else "device_full"
