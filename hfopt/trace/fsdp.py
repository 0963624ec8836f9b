"""FSDP2 on fake tensors: torch's own `fully_shard` in a world that is not there, recorded as one rank.

A process group of N ranks that is not there: collectives return at once, so one process can stand for rank 0 of any world. torch's "fake"
backend allocates what a real one would and moves nothing. A group that is already up is set aside meanwhile.

FSDP2 as accelerate sets it up, on fake tensors: accelerate's own wrapping code around torch's own `fully_shard`. What a rank takes then
comes out of the trace: its shard of the weights, the units gathered in forward and backward with the next one prefetched, the buffers of
all-gather and reduce-scatter on their own streams, its shard of the gradients and of the optimizer state. Gathered units come and go by
resizing their storage, which no dispatch mode sees; `resizes_seen` tells the recorder.

Known limits: the copies to the card of offloaded shards are not counted (a unit's shard each); collectives' own buffers (NCCL) belong to
the context.

The recorder of one rank: sees through DTensors to this rank's part, follows resized storages, and notes the stream of each block. A caching
allocator keeps the blocks of each CUDA stream apart, so what FSDP gathers on its own streams is not shared with the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.cpu
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hfopt.compat.torch_patches import process_groups_set_aside, resizes_seen
from hfopt.errors import TraceError
from hfopt.schema import Sharding, StepSettings
from hfopt.trace.events import Category
from hfopt.trace.recorder import Recorder

MESH_NAME = "fsdp"


@contextmanager
def fake_world(world_size: int) -> Iterator[Any]:
    """The mesh of rank 0 in a world of `world_size` ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with process_groups_set_aside():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=(MESH_NAME,))


def fully_sharded(build: Callable[[], Any], settings: StepSettings, sharding: Sharding, mesh: Any) -> Callable[[], Any]:
    """A build function whose model is sharded as `accelerate` would for this `fsdp_config`."""

    def build_sharded() -> Any:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

        model = build()
        if not has_fake_collectives():
            raise _cannot_shard(type(model).__name__, f"torch {torch.__version__} has no collectives for fake tensors, as newer ones do")
        mixed = settings.precision if settings.mixed else "no"
        with _environment_kept():
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=list(sharding.wrap) or None,
                reshard_after_forward=sharding.reshard_after_forward,
                cpu_offload=False,
                cpu_ram_efficient_loading=False,
            )
        if mixed != "no":
            plugin.set_mixed_precision(mixed)
        stand_in = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh=mesh,
            parallelism_config=SimpleNamespace(fsdp_dim_names=(MESH_NAME,)),
            mixed_precision=mixed,
            is_main_process=False,
            device=torch.device("cpu"),
        )
        try:
            if settings.sharding_recomputes:
                plugin.set_auto_wrap_policy(model)
                model = fsdp2_apply_ac(stand_in, model)
            return fsdp2_prepare_model(stand_in, model)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, AssertionError) as error:
            raise _cannot_shard(type(model).__name__, str(error)) from error

    return build_sharded


def refusal(error: TraceError, model_class: str) -> TraceError:
    """torch looks at all units together only when the first step begins; what it says then is not the model's fault."""
    said = str(error.__cause__ or error)
    return _cannot_shard(model_class, said.split(". ")[0]) if "FSDP" in said else error


def _cannot_shard(model_class: str, why: str) -> TraceError:
    return TraceError(f"FSDP2 cannot shard {model_class} with this torch and accelerate: {why}", hint="plan with another --engine")


def has_fake_collectives() -> bool:
    """Does this torch know what a gather of tensors without values returns? 2.6 does not."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"))


@contextmanager
def _environment_kept() -> Iterator[None]:
    """The plugin writes its settings into the environment, where a script's own FSDP would read them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor; a tensor that is not shared out is its own."""
    return getattr(tensor, "_local_tensor", tensor)


class ShardRecorder(Recorder):
    """Records the local part of every tensor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stream_numbers: dict[int, int] = {id(torch.cpu._default_cpu_stream): 0}
        self._resizes: list[Any] = []

    def __enter__(self) -> ShardRecorder:
        self._resizes.append(resizes_seen(self._resized))
        self._resizes[-1].__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizes.pop().__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)

    def allocate(self, size: int, op: Any = "") -> int:
        block = super().allocate(size, op)
        number = self._stream_numbers.setdefault(id(torch.cpu._current_stream), len(self._stream_numbers))
        if number:
            self.trace.streams[block] = number
        return block

    def take(self, tensor: torch.Tensor, category: Category | None = None, op: Any = "", *, size: int | None = None) -> None:
        super().take(local(tensor), category, op, size=size)

    def classify(self, tensors: Any, category: Category) -> None:
        super().classify((local(tensor) for tensor in tensors), category)

    def leave_on_host(self, tensor: torch.Tensor) -> None:
        super().leave_on_host(local(tensor))

    def _resized(self, storage: Any, size: int) -> None:
        """The block of a storage that shrinks to nothing is freed; one that grows back takes a new block: gathered weights."""
        if not self.recording:
            return
        key = storage._cdata
        self.forget(key)
        if size:
            self._watch(storage, key, self.allocate(size, "all_gather"))
            self.trace.categories[self._blocks[key]] = "weights"
