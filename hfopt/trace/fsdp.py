"""FSDP2 as accelerate sets it up, on fake tensors: accelerate's own wrapping code around torch's own `fully_shard`.

What a rank takes then comes out of the trace: its shard of the weights, the units gathered in forward and backward with the next one
prefetched, the buffers of all-gather and reduce-scatter on their own streams, its shard of the gradients and of the optimizer state.
Gathered units come and go by resizing their storage, which no dispatch mode sees; `resizes_seen` tells the recorder.

Known limits: the copies to the card of offloaded shards are not counted (a unit's shard each); collectives' own buffers (NCCL) belong to
the context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from hfopt.errors import TraceError
from hfopt.schema import Precision, Sharding
from hfopt.trace.world import MESH_NAME

_MIXED = ("bf16", "fp16")


def fully_sharded(build: Callable[[], Any], sharding: Sharding, precision: Precision, mesh: Any) -> Callable[[], Any]:
    """A build function whose model is sharded as `accelerate` would for this `fsdp_config`."""

    def build_sharded() -> Any:
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        model = build()
        if not has_fake_collectives():
            raise _cannot_shard(type(model).__name__, f"torch {torch.__version__} has no collectives for fake tensors, as newer ones do")
        mixed = precision if precision in _MIXED else "no"
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


@contextmanager
def resizes_seen(resized: Callable[[Any, int], None]) -> Iterator[None]:
    """`resized(storage, size)` after each `UntypedStorage.resize_`: how FSDP frees and takes back gathered weights."""
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


def local(tensor: Any) -> Any:
    """This rank's part of a tensor; a tensor that is not shared out is its own."""
    return getattr(tensor, "_local_tensor", tensor)
