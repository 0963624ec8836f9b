"""PyTorch's CUDA caching allocator as a pure simulation: reserved memory is what runs out, and only this order of events gives it.

Mirrors c10/cuda/CUDACachingAllocator.cpp: 512-byte rounding, a small and a large pool, best fit, splitting, merging, segments of 2 and
20 MiB, cached segments given back (and the request tried again) before an out-of-memory error. Each stream has its two pools of its own.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left

from hfopt.memory.allocator_options import AllocatorOptions
from hfopt.memory.blocks import LARGE_SEGMENT, MIN_BLOCK, SMALL_SEGMENT, Block, Blocks
from hfopt.memory.expandable import ExpandableSegments
from hfopt.units import MIB

# c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
_SMALL_REQUEST = 1 * MIB
_MIN_LARGE = 10 * MIB
_ROUND_LARGE = 2 * MIB
_OLDEST_SEGMENT_FIRST = (2, 13)  # the version of PyTorch; seen in 2.15


class OutOfMemory(Exception):  # noqa: N818 - a verdict of the simulation, not a failure
    """The request did not fit even after every cached segment was given back."""


class CachingAllocator(Blocks):
    """Allocate and free by block number; the counters are torch.cuda's."""

    def __init__(self, options: AllocatorOptions | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes)
        self.options = options or AllocatorOptions()
        self._plain = not (self.options.expandable_segments or self.options.max_split_bytes or self.options.roundup_power2_divisions)
        self._expandable = ExpandableSegments(self) if self.options.expandable_segments else None
        self.allocated = self.peak_allocated = 0
        self._live: dict[int, Block] = {}
        self._segments = itertools.count()

    # ------------------------------------------------------------------------------------------ requests

    def allocate(self, number: int, request: int, stream: int = 0) -> None:
        plain = self._plain  # most replays: the rules in a line each instead of a call each, which halves their time
        size = -(-request // MIN_BLOCK) * MIN_BLOCK if plain else self._rounded(request)
        which = 2 * stream + (size <= _SMALL_REQUEST)
        while which >= len(self.pools):
            self.pools.append([])
        pool = self.pools[which]
        at = bisect_left(pool, (size,))
        block = None
        if at < len(pool):
            if self._expandable is not None:
                at = self._expandable.best(pool, at)
            candidate = pool[at][3]
            if plain or self._usable(candidate, size):
                del pool[at]
                block = candidate
        if block is None:
            block = self._new_block(size, which)
        remaining = block.size - size
        if (remaining > _SMALL_REQUEST or (remaining and which & 1)) if plain else self._should_split(block, remaining, size):
            self.put(block.cut(size))
        block.free = False
        self._live[number] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, number: int) -> None:
        block = self._live.pop(number, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        before, after = block.previous, block.next
        if (before is not None and before.free) or (after is not None and after.free):
            self.merge(block)
        self.put(block)

    # ------------------------------------------------------------------------------------------ rules

    def _rounded(self, size: int) -> int:
        divisions = self.options.roundup_power2_divisions
        step = max(MIN_BLOCK, (1 << (size.bit_length() - 1)) // divisions) if divisions else MIN_BLOCK
        return -(-size // step) * step

    def _usable(self, block: Block, size: int) -> bool:
        """get_free_block: with a split limit, a large block is not spent on a small request, nor on one with too much left over."""
        limit = self.options.max_split_bytes
        if limit is None:
            return True
        return block.size < (limit if size < limit else size + LARGE_SEGMENT)

    def _should_split(self, block: Block, remaining: int, size: int) -> bool:
        if block.pool & 1 or self.options.expandable_segments:
            return bool(remaining)
        limit = self.options.max_split_bytes
        return remaining > _SMALL_REQUEST and (limit is None or size < limit)

    # ------------------------------------------------------------------------------------------ segments

    def _new_block(self, size: int, pool: int) -> Block:
        block = self._obtained(size, pool)
        if block is None and self._release_enough(size, pool):
            block = self._obtained(size, pool)
        if block is None:
            self._release_cached()
            block = self._obtained(size, pool)
        if block is None:
            raise OutOfMemory
        return block

    def _obtained(self, size: int, pool: int) -> Block | None:
        """A new segment, or more of the one that grows."""
        if self._expandable is not None:
            return self._expandable.new_block(size, pool)
        wanted = SMALL_SEGMENT if pool & 1 else LARGE_SEGMENT if size < _MIN_LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE
        return Block(self._next_segment(), 0, wanted, pool) if self.reserve(wanted) else None

    def _next_segment(self) -> int:
        """Of equal blocks the one of the oldest segment is taken (pytorch#183591); before 2.13 the one at the lowest address, and the
        driver hands out addresses downwards."""
        number = next(self._segments)
        return number if self.options.torch_version >= _OLDEST_SEGMENT_FIRST else -number

    def _release_enough(self, size: int, pool: int) -> bool:
        """release_available_cached_blocks: only with a split limit, and of the request's own pool; the smallest oversize segment that
        suffices, else the largest ones. Was that enough?"""
        limit = self.options.max_split_bytes
        if limit is None or self._expandable is not None:
            return False
        need = max(size, limit)
        oversize = [block for _, _, _, block in self.pools[pool] if block.size >= limit]
        for block in oversize:
            if block.size >= need:
                self.give_back(block)
                return True
        released = 0
        for block in reversed(oversize):
            if released < need:
                self.give_back(block)
                released += block.size
        return released >= need

    def _release_cached(self) -> None:
        """release_cached_blocks: every segment without a live block."""
        if self._expandable is not None:
            self._expandable.release()
            return
        for pool in self.pools:
            for block in [entry[3] for entry in pool if entry[3].whole]:
                self.give_back(block)
