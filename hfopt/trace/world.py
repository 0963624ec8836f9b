"""A process group of N ranks that is not there: collectives return at once, so one process can stand for rank 0 of any world.

torch's "fake" backend allocates what a real one would and moves nothing. A group that is already up (a script under torchrun that asks
for a plan) is set aside and put back afterwards: its tables (torch/distributed/distributed_c10d.py), and, by numbering ours from far
above, its names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

MESH_NAME = "fsdp"
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_tags_to_pg", "_pg_to_tag")
_FIRST_NAME = 1_000_000


@contextmanager
def fake_world(world_size: int) -> Iterator[Any]:
    """The mesh of rank 0 in a world of `world_size` ranks."""
    from torch._C._distributed_c10d import _unregister_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with _set_aside():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            yield init_device_mesh("cpu", (world_size,), mesh_dim_names=(MESH_NAME,))
        finally:
            for name in c10d._pg_names.values():
                _unregister_process_group(name)


@contextmanager
def _set_aside() -> Iterator[None]:
    saved: dict[str, Any] = {name: getattr(c10d, name) for name in (*_TABLES, "_world", "_group_count")}
    fresh = {**{name: {} for name in _TABLES}, "_world": c10d._World(), "_group_count": _FIRST_NAME}
    hook = sys.excepthook  # torch puts the rank before every line of a traceback from then on
    vars(c10d).update(fresh)
    try:
        yield
    finally:
        vars(c10d).update(saved)
        sys.excepthook = hook
