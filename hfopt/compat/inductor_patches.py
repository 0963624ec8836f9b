"""What is changed in torch's compiler for a compile whose kernels nobody runs: Inductor's own code, without Triton's work on it.

On the virtual GPU a kernel does nothing, so there is no need to make it: Inductor writes its source with what it reads and writes, and the
code that allocates around it, which is all that memory and traffic follow from. Triton and ptxas would take most of the time.
tests/test_canaries.py says when torch no longer has these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

ENVIRONMENT = {
    "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",  # the source then says how many bytes a kernel moves
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # there is nothing to compile in workers
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # kernels that were never made must not be found by another run
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedKernel:
    """One launch of a kernel that Inductor wrote."""

    name: str
    reduces: bool
    moved_bytes: float
    flops: float
    dtype: str  # of what it writes last


@contextmanager
def kernels_unmade(launched: Callable[[FusedKernel], None], around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """`launched` hears of every launch; compiled graphs run within `around()`."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    call, run, precompile = CompiledFxGraph.__call__, CachingAutotuner.run, CachingAutotuner.precompile

    def called(self: Any, inputs: Any) -> Any:
        with around():
            return call(self, inputs)

    def not_run(self: Any, *args: Any, **_: Any) -> None:
        launched(_kernel(self, args))

    CompiledFxGraph.__call__, CachingAutotuner.run = called, not_run
    CachingAutotuner.precompile = lambda *args, **options: None
    try:
        yield
    finally:
        CompiledFxGraph.__call__, CachingAutotuner.run, CachingAutotuner.precompile = call, run, precompile


def _kernel(tuner: Any, args: tuple[Any, ...]) -> FusedKernel:
    import torch

    meta = tuner.inductor_meta
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    stated = meta.get("kernel_num_gb")
    return FusedKernel(
        name=str(meta.get("kernel_name") or tuner.fn.__name__),
        reduces=bool(meta.get("num_reduction")),
        moved_bytes=float(sum(one.nbytes for one in tensors)) if stated is None else float(stated) * 1e9,
        flops=float(meta.get("kernel_flop") or 0.0),
        dtype=str(tensors[-1].dtype).removeprefix("torch.") if tensors else "float32",
    )


def compilations() -> tuple[int, int]:
    """(graphs that were compiled, places where one had to be cut) since the compiler was last reset."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())


def forget_compiled() -> None:
    import torch
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
