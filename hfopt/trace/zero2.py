"""ZeRO-1 and 2: weights whole, in one flat tensor per parameter group; buckets live during the backward, two of them with `overlap_comm`.

That the weights are there twice while they are flattened is left out: DeepSpeed does it on the host where the card is too small, and
empties the cache. With offloading one buffer of the largest weight stays on the card. The rank is the fullest: shares end inside weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hfopt.trace.optimizers import parameter_groups
from hfopt.trace.zero import REDUCTION_STREAM, ZeroLoop
from hfopt.trace.zero_layout import Layout


class Zero2Loop(ZeroLoop):
    def begin(self) -> None:
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                self.hold(parameter.numel(), parameter.dtype, "weights", "to_device")
        for elements, dtype in self.shares():
            self.hold(elements * self.world, dtype, "weights", "flatten")
        self._layout = Layout([[p.numel() for p in group["params"]] for group in parameter_groups(self.model)], self.world)
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
