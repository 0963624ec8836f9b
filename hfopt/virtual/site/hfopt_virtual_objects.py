"""Python objects that ranks send each other go over the CPU: torch would pickle them into device memory, which here holds no values.

Each function runs as it is, over a gloo group of the same ranks.
"""

from __future__ import annotations

import functools
import inspect
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


def install() -> None:
    for name in _FUNCTIONS:
        replaced = _over_host(getattr(dist, name))
        setattr(dist, name, replaced)
        setattr(dist.distributed_c10d, name, replaced)
