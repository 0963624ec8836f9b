"""DeepSpeed's ZeRO-3 by stated rules: weights that are gathered and given back module by module.

ZeRO-3's linear layers: DeepSpeed puts a function of its own in the place of `torch.nn.functional.linear`. It
(deepspeed/runtime/zero/linear.py) keeps the input for the backward whether the weight trains or not, where torch keeps it only for a weight
that does: under LoRA each frozen layer's input stays.

ZeRO-3's gathering of weights, module by module (deepspeed/runtime/zero/partitioned_param_coordinator.py). Before a module runs, its own
weights are gathered, and then, in the order of the step before, the next ones up to `prefetch_bucket` elements as long as fewer than
`max_live` are there. After it ran they are released, unless one of the next modules within `max_reuse_distance` elements uses them again.
Weights below `persistence_threshold` elements are never partitioned. Several weights gathered at once arrive in one flat tensor for each
dtype; when the first of them is used, all are copied out, and the flat tensors stay until the last of them is used. The first micro-batch
of a run only learns the order: nothing is gathered ahead, nothing kept for later. With `overlap_comm` all of this belongs to a stream of
its own.

Known limit: in the backward a module's weights are released when the next module's are asked for.

ZeRO-3: weights come and go (`zero_gather`); the bucket and this rank's gradients live as long as the model.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hfopt.compat.torch_patches import linear_layers_by
from hfopt.schema import Sharding
from hfopt.trace.zero import REDUCTION_STREAM, ZeroLoop


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(values, weight)
        if values.dim() == 2 and bias is not None:
            return torch.addmm(bias, values, weight.t())
        made = values.matmul(weight.t())
        return made if bias is None else made.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        (gradient,) = gradients
        of_values, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient.matmul(weight) if of_values else None,
            rows.t().matmul(values.reshape(-1, values.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


@contextlib.contextmanager
def inputs_kept() -> Iterator[None]:
    """While this is open, linear layers are DeepSpeed's."""

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = _Linear.apply(input, weight, bias)
        return made

    with linear_layers_by(linear):
        yield


GATHERING_STREAM = 2


@dataclass(slots=True)
class _Flight:
    """Weights gathered together, in one flat block for each dtype, on their way."""

    blocks: list[int]
    waiting: list[torch.Tensor]
    copied: bool = False


class Gathering:
    """Keeps the gathered weights of one record."""

    def __init__(self, model: Any, recorder: Any, sharding: Sharding) -> None:
        self._model, self._recorder, self._sizes = model, recorder, sharding.zero
        self._world, self._on_host = sharding.world_size, sharding.offload_parameters
        self._stream = GATHERING_STREAM if sharding.zero.overlap_comm else 0
        self._own: dict[int, list[torch.Tensor]] = {}
        self._live: dict[int, int] = {}  # parameter -> block
        self._flights: dict[int, _Flight] = {}  # parameter -> what brings it
        self._elements = 0
        self._step = 0
        self._seen: list[int] = []
        self._order: list[int] = []
        self._queue: deque[torch.Tensor] = deque()
        self._in_backward: int | None = None
        self._handles = list(self._install())
        self._hold_shards()

    def _hold_shards(self) -> None:
        """This rank's part of each weight, unless it is on the host, and the whole of those that are never partitioned."""
        by_dtype: dict[torch.dtype, int] = {}
        for parameter in self._model.parameters():
            shard = 0 if self._on_host else -(-parameter.numel() // self._world)
            whole = parameter.numel() if self._persists(parameter) else 0
            by_dtype[parameter.dtype] = by_dtype.get(parameter.dtype, 0) + shard + whole
        for dtype, elements in by_dtype.items():
            self._take(elements * dtype.itemsize, stream=0)

    def _take(self, size: int, *, stream: int | None = None) -> int:
        block: int = self._recorder.allocate(size, "all_gather")
        self._recorder.trace.categories[block] = "weights"
        stream = self._stream if stream is None else stream
        if stream:
            self._recorder.trace.streams[block] = stream
        return block

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

    # ------------------------------------------------------------------------------------------ moments

    def restart(self) -> None:
        """A new micro-batch begins: the order starts over."""
        self._order = self._order or self._seen
        self._step, self._in_backward, self._seen = 0, None, []
        self._queue = deque(parameter for module in self._order for parameter in self._own.get(module, ()))

    def release_all(self) -> None:
        for flight in {id(flight): flight for flight in self._flights.values()}.values():
            self._drop(flight)
        self._flights.clear()
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
        self._gather([parameter for parameter in self._own[key] if not self._known(parameter)])
        for parameter in self._own[key]:
            self._arrive(parameter)
            if self._queue and self._queue[0] is parameter:
                self._queue.popleft()
        room = min(self._sizes.max_live - self._elements, self._sizes.prefetch_bucket)
        ahead: list[torch.Tensor] = []
        while self._queue and sum(parameter.numel() for parameter in ahead) < room:
            parameter = self._queue.popleft()
            if not self._known(parameter) and not any(parameter is other for other in ahead):
                ahead.append(parameter)
        self._gather(ahead)

    def _known(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._live or id(parameter) in self._flights

    def _gather(self, parameters: list[torch.Tensor]) -> None:
        self._elements += sum(parameter.numel() for parameter in parameters)
        if len(parameters) == 1:
            (parameter,) = parameters
            self._live[id(parameter)] = self._take(parameter.nbytes)
            if self._on_host:
                self._recorder.release(self._take(-(-parameter.nbytes // self._world)))  # the shard on its way from the host
        elif parameters:
            sizes: dict[torch.dtype, int] = {}
            for parameter in parameters:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.nbytes
            flight = _Flight([self._take(size) for size in sizes.values()], list(parameters))
            self._flights |= dict.fromkeys(map(id, parameters), flight)

    def _arrive(self, parameter: torch.Tensor) -> None:
        flight = self._flights.pop(id(parameter), None)
        if flight is None:
            return
        if not flight.copied:
            self._live |= {id(one): self._take(one.nbytes) for one in flight.waiting}
            flight.copied = True
        flight.waiting = [one for one in flight.waiting if one is not parameter]
        if not flight.waiting:
            self._drop(flight)

    def _drop(self, flight: _Flight) -> None:
        for block in flight.blocks:
            self._recorder.release(block)

    def _release(self, key: int) -> None:
        soon = self._used_soon()
        for parameter in self._own[key]:
            if id(parameter) in self._live and id(parameter) not in self._flights and id(parameter) not in soon:
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


SUB_GROUP_ELEMENTS = 1_000_000_000  # zero_optimization.sub_group_size


class Zero3Loop(ZeroLoop):
    largest_group = SUB_GROUP_ELEMENTS

    def begin(self) -> None:
        self._gathering = Gathering(self.model, self.session.recorder, self.sharding)
        self._stream = REDUCTION_STREAM if self.sizes.overlap_comm else 0
        self._bucket: list[int] = []

    def make_optimizer(self) -> Any:
        """Each shard that is not float32 yet is cast, then copied; the largest group's gradients are made once and dropped: segments
        stay cached."""
        cast = [
            self.hold(elements, torch.float32, "weights", "cast")
            for elements, dtype in self.shares(largest=self.largest_group)
            if dtype != torch.float32
        ]
        made = super().make_optimizer()
        for block in cast:
            self.session.recorder.release(block)
        if self.sizes.contiguous_gradients:
            self.hold(self.sizes.reduce_bucket, self.dtype, "gradients", "reduce_bucket")
        if not self.sharding.offload_optimizer:
            self.hold(sum(elements for elements, _ in self.shares()), self.dtype, "gradients", "own_gradients")
        return made

    def run(self, steps: int) -> Any:
        try:
            with inputs_kept():
                return super().run(steps)
        finally:
            self._gathering.remove()

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        self._is_last = is_last
        self._gathering.restart()
        yield
        self._reduce()
        self._gathering.release_all()

    def _reduced(self, parameter: torch.Tensor) -> None:
        super()._reduced(parameter)
        self._bucket.append(parameter.numel())

    def on_reduction(self, elements: int) -> None:
        """Several gradients are laid out by rank in a flat tensor of their own before they are scattered."""
        alone = len(self._bucket) == 1 and elements % self.world == 0
        flat = None if alone else self.hold(elements, self.dtype, "gradients", "reduce_scatter", stream=self._stream)
        if self.sharding.offload_optimizer:
            for size in self._bucket:
                piece = -(-size // self.world)
                block = self.hold(piece, self.dtype, "gradients", "from_host", stream=self._stream)
                if self._is_last:
                    self.norm_of(piece, stream=self._stream)
                    self.session.recorder.release(self.hold(piece, torch.float32, "gradients", "to_host", stream=self._stream))
                self.session.recorder.release(block)
        if flat is not None:
            self.session.recorder.release(flat)
        self._bucket = []

    @property
    def largest_piece(self) -> int:
        largest: int = max(parameter.numel() for parameter in self.trained)
        return -(-largest // self.world)
