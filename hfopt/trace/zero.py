"""DeepSpeed's ZeRO by stated rules on the traced step: what all stages share, and stages 1 and 2.

Who owns which gradient under ZeRO-2: each group's weights lie one after the other in a flat tensor that is cut into equal parts. A weight
may cross a border, and its gradient is then kept whole by both neighbours (stage_1_and_2.py, `copy_grads_in_partition`).

ZeRO by stated rules on the traced step: DeepSpeed does not run on fake tensors, so what it allocates is put in where it would. Both stages
(deepspeed/runtime/zero/stage_1_and_2.py, stage3.py; read at 0.19): the model computes in the mixed precision's dtype without autocast; each
rank keeps 1/N of the trained weights in float32, with the optimizer's states beside; a gradient is copied into a bucket of
`reduce_bucket_size` elements as soon as it is whole (one larger than the bucket waits for the next reduction) and only this rank's part
stays; the update runs group by group on flat tensors, with this group's gradients in float32.

Offloaded states are updated on the host and not counted; each gradient is copied there as soon as it is reduced.

ZeRO-1 and 2: weights whole, in one flat tensor per parameter group; buckets live during the backward, two of them with `overlap_comm`. That
the weights are there twice while they are flattened is left out: DeepSpeed does it on the host where the card is too small, and empties the
cache. With offloading one buffer of the largest weight stays on the card. The rank is the fullest: shares end inside weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch

from hfopt.schema import Precision
from hfopt.trace.trainer_step import TrainerLoop, make_optimizer, parameter_groups


class FlatLayout:
    """The parts of the flat groups, in elements."""

    def __init__(self, groups: Sequence[Sequence[int]], world: int) -> None:
        self._world = world
        self._parts: list[list[range]] = []  # the ranks that own a part of each weight
        self._pieces: list[list[int]] = []  # the largest part of each weight that one rank owns
        for sizes in groups:
            part = max(1, -(-sum(sizes) // world))
            ends = list(accumulate(sizes))
            self._parts.append([range((end - size) // part, -(-end // part)) for size, end in zip(sizes, ends, strict=True)])
            self._pieces.append([max(_cut(end - size, end, part)) for size, end in zip(sizes, ends, strict=True)])
        self._sizes = groups

    @property
    def largest_kept(self) -> int:
        """The gradients the fullest rank keeps."""
        kept = [0] * self._world
        for sizes, parts in zip(self._sizes, self._parts, strict=True):
            for size, ranks in zip(sizes, parts, strict=True):
                for rank in ranks:
                    kept[rank] += size
        return max(kept)

    def pieces(self, bucket: Sequence[tuple[int, int]]) -> int:
        """Stretches of a bucket that belong to one rank each; a weight is named by its group and its place there."""
        owners = [rank for group, place in bucket for rank in self._parts[group][place]]
        return sum(1 for _ in groupby(owners))

    def largest_pieces(self, bucket: Sequence[tuple[int, int]]) -> list[int]:
        return [self._pieces[group][place] for group, place in bucket]


def _cut(start: int, end: int, part: int) -> list[int]:
    """The lengths of a stretch cut at the multiples of `part`."""
    borders = [start, *range(-(-(start + 1) // part) * part, end, part), end]
    return [after - before for before, after in pairwise(borders)]


REDUCTION_STREAM = 1  # with overlap_comm, what is made while reducing belongs to a stream of its own
_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_compute_dtype(build: Callable[[], Any], precision: Precision, *, made_in_parts: bool) -> Callable[[], Any]:
    """DeepSpeed casts the whole model before it trains, but a model that was made in parts (stage 3) only while it is made.

    Transformers makes a model inside `deepspeed.zero.Init`, which gives each weight the compute dtype and splits it, unless it is
    quantized (modeling_utils.py, `get_init_context`); the engine then casts nothing (engine.py, `_cast_module_mixed_precision`).
    Adapters come later and stay in peft's float32. That the arguments were there before the model is assumed, as the Trainer asks for.
    """
    dtype = _COMPUTE.get(precision)

    def build_cast() -> Any:
        model = build()
        is_quantized = any(not parameter.is_floating_point() for parameter in model.parameters())
        kept = {id(parameter) for parameter in _adapters(model)} if made_in_parts and not is_quantized else set()
        cast: dict[int, Any] = {}
        for module in model.modules() if dtype is not None else ():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in kept:
                    continue
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    if id(parameter) not in cast:
                        cast[id(parameter)] = (
                            torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad),
                            parameter,
                        )
                    module._parameters[name] = cast[id(parameter)][0]
        return model

    return build_cast


def _adapters(model: Any) -> Iterator[Any]:
    """What peft's layers have besides the layer they stand around; copies of whole modules (`modules_to_save`) are none."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()) if "base_layer" in module._modules else ():
            yield from getattr(module, name).parameters()


class ZeroLoop(TrainerLoop):
    """What the stages share: flat float32 shards, an update per group, gradients that leave through a bucket."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.autocast_dtype = None
        assert self.settings.sharding is not None
        self.sharding = self.settings.sharding
        self.sizes, self.world = self.sharding.zero, self.sharding.world_size
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._filled = 0
        self._waiting: torch.Tensor | None = None  # a gradient larger than the bucket
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._reduced) for parameter in self.trained]

    def run(self, steps: int) -> Any:
        try:
            return super().run(steps)
        finally:
            for hook in self._hooks:
                hook.remove()

    def hold(self, elements: int, dtype: torch.dtype, category: Any, what: str, *, stream: int = 0) -> int:
        """A block of the engine's own, until it is released."""
        recorder = self.session.recorder
        block = recorder.allocate(elements * dtype.itemsize, what)
        recorder.trace.categories[block] = category
        if stream:
            recorder.trace.streams[block] = stream
        return block

    def shares(self, *, largest: int | None = None) -> list[tuple[int, torch.dtype]]:
        """This rank's elements of each parameter group, cut into pieces of at most `largest`."""
        found = []
        for group in parameter_groups(self.model):
            elements = -(-sum(parameter.numel() for parameter in group["params"]) // self.world)
            while elements:
                piece = min(elements, largest or elements)
                found.append((piece, group["params"][0].dtype))
                elements -= piece
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Gradients are reduced and kept in the compute dtype, whatever the weights have (engine.py, `communication_data_type`)."""
        return _COMPUTE.get(self.settings.precision, self.trained[0].dtype)

    # ------------------------------------------------------------------------------------------ gradients

    def _reduced(self, parameter: torch.Tensor) -> None:
        """A gradient is whole: into the bucket, or, where it is larger, alone."""
        self.before_first_gradient()
        if self._filled and self._filled + parameter.numel() > self.sizes.reduce_bucket:
            self._reduce()
        self._filled += parameter.numel()
        if parameter.numel() > self.sizes.reduce_bucket or not self.sizes.contiguous_gradients:
            self._waiting = parameter.grad
        parameter.grad = None

    def _reduce(self) -> None:
        self.on_reduction(self._filled)
        self._filled, self._waiting = 0, None

    def before_first_gradient(self) -> None:
        """Of a backward."""

    def on_reduction(self, elements: int) -> None:
        """Of a bucket with that many gradients."""

    # ------------------------------------------------------------------------------------------ the update

    def make_optimizer(self) -> Any:
        """Float32 shards and one optimizer for each; on the host they are nobody's business here."""
        self._updates: list[tuple[torch.Tensor, Any]] = []
        if self.sharding.offload_optimizer:
            return None
        for elements, _ in self.shares(largest=self.largest_group):
            master = torch.zeros(elements, dtype=torch.float32)
            self.session.recorder.classify([master], "weights")
            optimizer = make_optimizer(self.model, self.settings.optim, self.settings.optim_args, groups=[{"params": [master]}])
            self._updates.append((master, optimizer))
        return None

    largest_group: int | None = None

    def _optimizer_step(self, optimizer: Any) -> torch.Tensor:
        recorder = self.session.recorder
        first_block = recorder.next_block
        if not self.sharding.offload_optimizer:
            self.norm_of(self.largest_piece)
        for master, update in self._updates:
            gradient = torch.zeros(master.numel(), dtype=self.dtype).to(torch.float32)
            self.release_gradients(master.numel())
            master.grad = gradient
            del gradient
            update.step()
            master.grad = None
        self.release_gradients(None)
        recorder.classify_live(first_block, "optimizer")
        return torch.zeros(())

    @property
    def largest_piece(self) -> int:
        """Elements of the largest gradient a rank owns."""
        raise NotImplementedError

    def norm_of(self, elements: int, *, stream: int = 0) -> None:
        """Norms are taken in float64, one gradient after the other (deepspeed/runtime/zero/utils.py, `get_norm_dtype`)."""
        self.session.recorder.release(self.hold(elements, torch.float64, "gradients", "norm", stream=stream))

    def release_gradients(self, elements: int | None) -> None:
        """Of a group that has its float32 copy now; None: of all."""


class Zero2Loop(ZeroLoop):
    def begin(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                self.hold(parameter.numel(), parameter.dtype, "weights", "to_device")
        for elements, dtype in self.shares():
            self.hold(elements * self.world, dtype, "weights", "flatten")
        self._layout = FlatLayout([[p.numel() for p in group["params"]] for group in parameter_groups(self.model)], self.world)
        self._places = {id(p): (g, i) for g, group in enumerate(parameter_groups(self.model)) for i, p in enumerate(group["params"])}
        self._stream = REDUCTION_STREAM if self.sizes.overlap_comm else 0
        self._bucket: list[tuple[int, int]] = []
        self._buckets: list[int] = []
        self._own: int | None = None  # this rank's gradients, in the dtype they came in
        self._accumulated: int | None = None

    def make_optimizer(self) -> Any:
        """Then the gradients of all groups are made once and dropped (initialize_optimizer_states): their segments stay cached."""
        made = super().make_optimizer()
        if self.sharding.offload_optimizer:
            self.hold(max(parameter.numel() for parameter in self.trained), self.dtype, "gradients", "offload_buffer")
        else:
            for block in [self.hold(elements, torch.float32, "gradients", "first_gradients") for elements, _ in self.shares()]:
                self.session.recorder.release(block)
        return made

    def before_first_gradient(self) -> None:
        if not self._buckets and self.sizes.contiguous_gradients:
            for _ in range(2 if self.sizes.overlap_comm else 1):
                self._buckets.append(self.hold(self.sizes.reduce_bucket, self.dtype, "gradients", "reduce_bucket"))

    def _reduced(self, parameter: torch.Tensor) -> None:
        """Stage 1 leaves gradients whole until the last micro-batch, and until its end where communication does not overlap."""
        if not self.sizes.divides_gradients and not (self._is_last and (self.sizes.overlap_comm or self._is_over)):
            self.before_first_gradient()
            return
        super()._reduced(parameter)
        self._bucket.append(self._places[id(parameter)])

    def on_reduction(self, elements: int) -> None:
        """Gradients of several ranks are put side by side in a flat tensor before they are summed; what this rank owns is kept.
        Those of one rank need none: a block of no bytes stands there, so that models of two depths go through the same moments."""
        flat = elements if self._layout.pieces(self._bucket) > 1 else 0
        self.session.recorder.release(self.hold(flat, self.dtype, "gradients", "flatten", stream=self._stream))
        if self.sharding.offload_optimizer and self._is_last:
            for piece in self._layout.largest_pieces(self._bucket):
                self.norm_of(piece, stream=self._stream)
                self.session.recorder.release(self.hold(piece, torch.float32, "gradients", "to_host", stream=self._stream))
        self._bucket = []
        if self._own is None and not self.sharding.offload_optimizer:
            self._own = self.hold(self._layout.largest_kept, self.dtype, "gradients", "own_gradients", stream=self._stream)

    @property
    def largest_piece(self) -> int:
        return max(self._layout.largest_pieces(list(self._places.values())))

    @contextlib.contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        self._is_last, self._is_over = is_last, False
        yield
        self._is_over = True
        for parameter in self.trained:
            if is_last and parameter.grad is not None:
                self._reduced(parameter)
        if self._bucket:
            self._reduce()
        if is_last or self.sizes.divides_gradients:
            for block in self._buckets:
                self.session.recorder.release(block)
            self._buckets = []
        if self._accumulated is not None and self._own is not None:  # added to the first micro-batch's
            self.session.recorder.release(self._own)
            self._own = None
        elif not is_last:
            self._accumulated, self._own = self._own, None

    def release_gradients(self, elements: int | None) -> None:
        if elements is None:  # all groups share one buffer
            for block in (self._accumulated, self._own):
                if block is not None:
                    self.session.recorder.release(block)
            self._accumulated = self._own = None
