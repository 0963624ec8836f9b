"""Python objects that ranks send each other go over the CPU: torch would pickle them into device memory, which here holds no values.

Each function runs as it is, over a gloo group of the same ranks. A group's threads must end before the interpreter does, or they abort the
process: these groups end with those of the script, or when it ends.
"""

from __future__ import annotations

import atexit
import functools
import inspect
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_FUNCTIONS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
_on_host: dict[Any, Any] = {}


def _host_group(group: Any) -> Any:
    group = dist.group.WORLD if group is None else group
    if group not in _on_host:
        ranks = dist.get_process_group_ranks(group)
        _on_host[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _on_host[group]


def _over_host(function: Any) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def sent(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if dist.get_backend(given.arguments.get("group")) == "nccl":
            given.arguments["group"] = _host_group(given.arguments.get("group"))
            given.arguments.pop("device", None)
        return function(*given.args, **given.kwargs)

    return sent


def _ends_all(function: Any) -> Any:
    @functools.wraps(function)
    def ended(*args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs:  # all groups; what is still referred to here would live on
            _on_host.clear()
        return function(*args, **kwargs)

    return ended


def _leave() -> None:
    while _on_host:
        _, group = _on_host.popitem()
        with suppress(ValueError, RuntimeError):  # the script has ended it itself
            dist.destroy_process_group(group)


def install() -> None:
    atexit.register(_leave)
    ends = _ends_all(dist.destroy_process_group)
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = ends
    for name in _FUNCTIONS:
        replaced = _over_host(getattr(dist, name))
        setattr(dist, name, replaced)
        setattr(dist.distributed_c10d, name, replaced)
