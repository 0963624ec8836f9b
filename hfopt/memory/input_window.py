"""The inputs of one accumulation window: the Trainer fetches all its micro-batches before the first runs, so they wait on the device.

`Trainer.get_batch_samples` (transformers 4.46 on) walks the data loader, which puts each batch onto the device as it comes. A step with
accumulation is traced with two micro-batches, a further one takes nothing but its inputs: they are added here, by an allocator of their
own. Compared with whole traces at an accumulation of 16 and 32 (ViT, Swin, Wav2Vec2, BERT) that is at most 12 MiB too much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hfopt.memory.allocator import AllocatorOptions, CachingAllocator

_SIZES = (2, 3)  # samples, as a trace has them: every tensor's bytes are a line over the batch size


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """The tensors of a batch, in bytes at two batch sizes."""

    few: tuple[int, ...]
    more: tuple[int, ...]

    @classmethod
    def of(cls, make_batch: Callable[[int], dict[str, Any]]) -> BatchInputs:
        few, more = (_tensor_bytes(make_batch(size)) for size in _SIZES)
        if len(few) != len(more):  # one tensor for each sample or image: what they take together is a line
            few, more = (sum(few),), (sum(more),)
        return cls(few, more)

    def sizes(self, batch: int) -> list[int]:
        """The bytes of each tensor."""
        few, _ = _SIZES
        return [max(0, one + (two - one) * (batch - few)) for one, two in zip(self.few, self.more, strict=True)]

    def waiting_bytes(self, batch: int, batches: int, options: AllocatorOptions) -> int:
        """What so many batches take beside all others, in whole segments."""
        allocator = CachingAllocator(options)
        sizes = self.sizes(batch)
        for number in range(batches):
            for index, size in enumerate(sizes):
                if size:
                    allocator.allocate(number * len(sizes) + index, size)
        return allocator.peak_reserved


def _tensor_bytes(batch: dict[str, Any]) -> tuple[int, ...]:
    import torch
    from torch.utils._pytree import tree_leaves

    return tuple(leaf.numel() * leaf.element_size() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
