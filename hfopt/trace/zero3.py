"""ZeRO-3: weights come and go (`zero_gather`); the bucket and this rank's gradients live as long as the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hfopt.trace.zero import REDUCTION_STREAM, ZeroLoop
from hfopt.trace.zero_gather import Gathering
from hfopt.trace.zero_linear import inputs_kept

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
