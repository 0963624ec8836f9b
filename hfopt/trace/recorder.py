"""The recorder of one rank: sees through DTensors to this rank's part, follows resized storages, and notes the stream of each block.

A caching allocator keeps the blocks of each CUDA stream apart, so what FSDP gathers on its own streams is not shared with the rest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.cpu
from torch.distributed.tensor import DTensor

from hfopt.trace.fsdp import local, resizes_seen
from hfopt.trace.trace import Category, Recorder


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
