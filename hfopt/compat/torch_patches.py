"""What is changed in torch, and put back: for a trace, and for a compile whose kernels nobody runs.

Each is a context manager around one function or table of torch; tests/test_canaries.py says when torch no longer has it.

On the virtual GPU a kernel does nothing, so there is no need to make it: Inductor writes its source with what it reads and writes, and the
code that allocates around it, which is all that memory and traffic follow from. Triton and ptxas would take most of the time.
tests/test_canaries.py says when torch no longer has these names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

_GROUP_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
"""Of torch/distributed/distributed_c10d.py: who belongs to which process group."""
_FIRST_GROUP = 1_000_000


def tf32_is_on() -> bool:
    """Do float32 matrix products run in TF32? torch has two settings for it, and refuses to read the old one once the new was used."""
    import torch

    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9; it tells what either setting said
        return bool(matmul.fp32_precision == "tf32")
    return bool(matmul.allow_tf32)


def set_tf32(on: bool) -> None:
    """By the setting that this transformers uses."""
    import torch

    try:
        from transformers.utils.import_utils import enable_tf32
    except ImportError:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    else:
        enable_tf32(on)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Each parameter that a module registers lands on the meta device, with its own class and attributes."""
    from torch import nn

    register = nn.Module.register_parameter

    def register_on_meta(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None and parameter.device.type != "meta":
            attributes = parameter.__dict__
            parameter = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            parameter.__dict__.update(attributes)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def swaps_allowed() -> Iterator[None]:
    """nn.Module._apply swaps fake parameters, and fails where `.to()` had nothing to do: then there is nothing to swap."""
    import torch

    original = torch.utils.swap_tensors

    def swap(one: Any, two: Any) -> None:
        if one.dtype != two.dtype or one.device != two.device:
            original(one, two)

    torch.utils.swap_tensors = swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = original


@contextmanager
def linear_layers_by(linear: Callable[..., Any]) -> Iterator[None]:
    """`linear(input, weight, bias=None)` stands in for `torch.nn.functional.linear`, as DeepSpeed's own does under ZeRO-3."""
    import torch

    usual = torch.nn.functional.linear
    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = usual


@contextmanager
def resizes_seen(resized: Callable[[Any, int], None]) -> Iterator[None]:
    """`resized(storage, size)` after each `UntypedStorage.resize_`: how FSDP frees and takes back gathered weights."""
    import torch

    inherited = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = inherited(storage, size)
        resized(storage, size)
        return result

    torch.UntypedStorage.resize_ = resize
    try:
        yield
    finally:
        del torch.UntypedStorage.resize_


@contextmanager
def process_groups_set_aside() -> Iterator[None]:
    """Groups that are already up (a script under torchrun that asks for a plan) come back afterwards.

    Their tables are replaced by empty ones; ours are numbered from far above, so that names do not meet.
    """
    from torch._C._distributed_c10d import _unregister_process_group
    from torch.distributed import distributed_c10d as c10d

    saved: dict[str, Any] = {name: getattr(c10d, name) for name in (*_GROUP_TABLES, "_world", "_group_count")}
    fresh = {**{name: {} for name in _GROUP_TABLES}, "_world": c10d._World(), "_group_count": _FIRST_GROUP}
    hook = sys.excepthook  # torch puts the rank before every line of a traceback from then on
    vars(c10d).update(fresh)
    try:
        yield
    finally:
        for name in c10d._pg_names.values():
            _unregister_process_group(name)
        vars(c10d).update(saved)
        sys.excepthook = hook


@contextmanager
def lists_of_scalars(read: Callable[[Any], Any]) -> Iterator[None]:
    """`torch.tensor([a.max(), ...])` reads each element on the host, as on CUDA; of fake tensors it finds no data, so `read` does."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_map_only

    original = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, (list, tuple)):
            data = tree_map_only(FakeTensor, lambda one: read(one) if one.numel() == 1 else one, data)
        return original(data, *args, **kwargs)

    torch.tensor = tensor
    try:
        yield
    finally:
        torch.tensor = original


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """`torch.distributions` (time series) checks the range of parameters whose values a trace does not know."""
    import torch

    distribution = torch.distributions.Distribution
    validates = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(validates)


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
