"""Every form in which a log says that memory ran out, and who said it.

PyTorch 1.13 to 2.15 (allocators of CUDA, ROCm, XPU, NPU and MPS), the CUDA runtime, cuBLAS and its kin, NCCL, bitsandbytes, vLLM, the C++
and Python heaps, NumPy, the kernel's OOM killer and what schedulers, launchers and shells say of it, PyTorch's DataLoader and Windows.
`facts/oom_errors.py` judges an exception that a program holds; here only its words are there, cut, wrapped and mixed with others'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hfopt.facts.oom_errors import STICKY, where_in
from hfopt.schema import OomCause


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
    _form(
        "PyTorch on the CPU",
        1,
        r"DefaultCPUAllocator|CPUAllocator.{0,40}memalign|(?<!MPS )(?:can't allocate|not enough) memory: you tried",
        "host",
    ),
    _form("Ascend's runtime", 3, r"Memory_Allocation_Failure"),
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
        r"RESOURCE_EXHAUSTED|Resource exhausted: .{0,80}(?:memory|allocat)"
        r"|^\s*Out of memory while trying to allocate|PT_DEVMEM Allocation failed|OOM when allocating tensor"
        r"|Ran out of memory in memory space hbm|failed to allocate .{0,60}from device",
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
    _form("Kubernetes", 4, r"low on resource: memory|Evicted\b.{0,80}memory|OOMKilled(?!\W{0,3}[:=]\s*(?:false|0\b))", "host_killed"),
    _form("the kernel", 4, r"invoked oom-killer|killed by (?:the )?OOM[- ]killer|systemd-oomd.{0,40}killed|OOMKilling", "host_killed"),
    _form(
        "the scheduler",
        4,
        r"oom[_-]kill event|OOM[- ]?Killed(?!\W{0,3}[:=]\s*(?:false|0\b))|Exceeded (?:job|step) memory limit"
        r"|\bOUT_OF_ME(?:MORY\b|\+)|oom_kill"
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
        rf"(?:exit|error|return) ?code\s*[:= ]*\(?-9\b|(?:exit|non-zero exit) (?:status|code):?\s+{_KILLED}"
        rf"|exited (?:with )?(?:code )?\(?{_KILLED}|non-zero code: {_KILLED}|status=9/KILL",
        "host_killed",
        certain=False,
    ),
    _form("the launcher", 6, r"exit ?code\s*[:= ]*\(?-7\b|SIGBUS", "shared_memory", certain=False),
    _form(
        "the launcher",
        6,
        r"SIGKILL(?!_handler)|\bsignal:? 9\b|code 137\b|exitcode[: ]+137\b|Signal Code: Killed",
        "host_killed",
        certain=False,
    ),
    _form(
        "the shell",
        6,
        r"(?:^\s*[`*]{0,3}(?:\S+: line \d+:\s*)?(?:\[\d+\]\s*[+-]?\s*)?\d*\s*(?:zsh: )?|(?:\w/s|s/\w+)[^\]]{0,80}\]\s*)"
        r"(?:killed\b(?!\s*(?:by|subprocess|process|worker))|已杀死|Getötet|強制終了)",
        "host_killed",
        certain=False,
    ),
    _form("PyTorch", 7, r"\bTried to allocate \d[\d.]* ?[KMG]i?B\b"),
    _form("the C++ heap", 7, r"virtual memory exhausted|out of memory, malloc failed", "host"),
    _form("CUDA", 8, r"(?:CUDA|GPU|HIP|VRAM|CU\w+|error|fail\w*|exception)\b.{0,60}\bout of memory\b", certain=False),
    _form("Windows", 7, r"Sysmem Fallback|shared GPU memory", "spill", certain=False),
)
_ANY = (  # one of these words is in every line of a form: a substring costs a hundredth of a pattern
    "memor alloc _status_ kill sigbus signal|9 -7 -9 137 resource 1455 oom cudnn dataloader kv|cache cache|blocks abruptly outof out_of "
    "已杀死 getötet 強制終了 memlimit max|seq model|len sysmem mmap died crash available|ram executable|batch invalid|buffer "
    "engine|to|execute fft_ paging|file nvml_success kernelerror"
)
_WORDS = tuple(words.replace("|", " ") for words in _ANY.split())
_NOT_MEMORY = re.compile(
    r"out of resource: |OutOfResources|LaunchOutOfResources|CUDA out of memory errors? (?:may|can|might)|to avoid (?:CUDA )?out of memory"
    r"|(?:unable to shut ?down|forc(?:e|ibl|eful)\w*|sen[dt]\w*|escalat\w*)\b.{0,80}SIGKILL"  # a launcher that ends its own processes
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
    plain = text.lower()
    if not any(word in plain for word in _WORDS) or _NOT_MEMORY.search(text) or talks_of_it(text):
        return None
    return next((form for form in FORMS if form.sign.search(text)), None)


def other_fault(text: str) -> bool:
    """A fault that leaves the device's context broken: what follows it says nothing of memory."""
    return STICKY.search(text) is not None and where_in(text) is None
