"""What is changed in torch for the time of a trace, and put back: parameters made on meta, swaps, resized storages, process groups.

Each is a context manager around one function or table of torch; tests/test_canaries.py says when torch no longer has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
