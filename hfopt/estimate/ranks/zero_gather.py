"""ZeRO-3's gathering of weights, module by module (deepspeed/runtime/zero/partitioned_param_coordinator.py).

Before a module runs, its own weights are gathered, and then, in the order of the step before, the next ones up to `prefetch_bucket`
elements as long as fewer than `max_live` are there. After it ran they are released, unless one of the next modules within
`max_reuse_distance` elements uses them again. Weights below `persistence_threshold` elements are never partitioned.
Several weights gathered at once arrive in one flat tensor and are copied out of it.

Known limit: in the backward a module's weights are released when the next module's are asked for.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch

from hfopt.schema import Sharding

_ORDER = "_hfopt_zero3_order"


class Gathering:
    """Keeps the gathered weights of one record; the order of modules is kept on the model for the next."""

    def __init__(self, model: Any, recorder: Any, sharding: Sharding) -> None:
        self._model, self._recorder, self._sizes = model, recorder, sharding.zero
        self._own: dict[int, list[torch.Tensor]] = {}
        self._live: dict[int, int] = {}  # parameter -> block
        self._elements = 0
        self._step = 0
        self._seen: list[int] = []
        self._order: list[int] = getattr(model, _ORDER, [])
        self._queue: deque[torch.Tensor] = deque()
        self._in_backward: int | None = None
        self._handles = list(self._install())
        if not sharding.offload_parameters:
            self._hold_shards(sharding.world_size)

    def _hold_shards(self, world_size: int) -> None:
        by_dtype: dict[torch.dtype, int] = {}
        for parameter in self._model.parameters():
            elements = parameter.numel() if self._persists(parameter) else 0
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) - (-parameter.numel() // world_size) + elements
        for dtype, elements in by_dtype.items():
            block = self._recorder.allocate(elements * dtype.itemsize, "partition")
            self._recorder.trace.categories[block] = "weights"

    def _persists(self, parameter: torch.Tensor) -> bool:
        return int(parameter.numel()) <= self._sizes.persistence_threshold

    def _install(self) -> Any:
        for module in self._model.modules():
            own = [parameter for parameter in module._parameters.values() if parameter is not None and not self._persists(parameter)]
            if own:
                self._own[id(module)] = own
                yield module.register_forward_pre_hook(self._before_forward)
                yield module.register_forward_hook(self._after_forward)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        setattr(self._model, _ORDER, self._seen or self._order)

    # ------------------------------------------------------------------------------------------ moments

    def restart(self) -> None:
        """A new micro-batch begins: the order starts over."""
        self._step, self._in_backward, self._seen = 0, None, []
        self._queue = deque(parameter for module in self._order for parameter in self._own.get(module, ()))

    def release_all(self) -> None:
        for key in list(self._live):
            self._free(key)
        self._elements = 0

    def _before_forward(self, module: Any, _: Any) -> None:
        self._fetch(id(module))

    def _after_forward(self, module: Any, _: Any, out: Any) -> None:
        self._release(id(module))
        tensor = next((leaf for leaf in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(leaf, torch.Tensor)), None)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(partial(self._before_backward, id(module)))

    def _before_backward(self, key: int, _: Any) -> None:
        if self._in_backward is not None and self._in_backward != key:
            self._release(self._in_backward)
        self._in_backward = key
        self._fetch(key)

    # ------------------------------------------------------------------------------------------ weights

    def _fetch(self, key: int) -> None:
        self._seen.append(key)
        self._step += 1
        self._gather([parameter for parameter in self._own[key] if id(parameter) not in self._live])
        for parameter in self._own[key]:
            if self._queue and self._queue[0] is parameter:
                self._queue.popleft()
        room = min(self._sizes.max_live - self._elements, self._sizes.prefetch_bucket)
        ahead: list[torch.Tensor] = []
        while self._queue and sum(parameter.numel() for parameter in ahead) < room:
            parameter = self._queue.popleft()
            if id(parameter) not in self._live and not any(parameter is other for other in ahead):
                ahead.append(parameter)
        self._gather(ahead)

    def _gather(self, parameters: list[torch.Tensor]) -> None:
        size = sum(parameter.nbytes for parameter in parameters)
        flat = self._recorder.allocate(size, "all_gather") if len(parameters) > 1 else None
        for parameter in parameters:
            block = self._recorder.allocate(parameter.nbytes, "all_gather")
            self._recorder.trace.categories[block] = "weights"
            self._live[id(parameter)] = block
            self._elements += parameter.numel()
        if flat is not None:
            self._recorder.release(flat)

    def _release(self, key: int) -> None:
        soon = self._used_soon()
        for parameter in self._own[key]:
            if id(parameter) in self._live and id(parameter) not in soon:
                self._elements -= parameter.numel()
                self._free(id(parameter))

    def _used_soon(self) -> set[int]:
        found: set[int] = set()
        elements = 0
        for key in self._order[self._step :]:
            if elements >= self._sizes.max_reuse_distance:
                break
            for parameter in self._own.get(key, ()):
                found.add(id(parameter))
                elements += parameter.numel()
        return found

    def _free(self, key: int) -> None:
        self._recorder.release(self._live.pop(key))
