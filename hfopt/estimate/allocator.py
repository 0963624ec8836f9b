"""PyTorch's CUDA caching allocator as a pure simulation: reserved memory is what runs out, and only this order of events gives it.

Mirrors c10/cuda/CUDACachingAllocator.cpp: 512-byte rounding, a small and a large pool, best fit, splitting, merging, segments of 2 and
20 MiB, cached segments given back (and the request tried again) before an out-of-memory error. Each stream has its two pools of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from hfopt.estimate.allocator_options import AllocatorOptions
from hfopt.units import MIB

# c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
_MIN_BLOCK = 512
_SMALL_REQUEST = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_MIN_LARGE = 10 * MIB
_ROUND_LARGE = 2 * MIB
_OLDEST_SEGMENT_FIRST = (2, 13)  # the version of PyTorch; seen in 2.15


class OutOfMemory(Exception):  # noqa: N818 - a verdict of the simulation, not a failure
    """The request did not fit even after every cached segment was given back."""


class _Block:
    __slots__ = ("free", "next", "offset", "pool", "previous", "segment", "size")

    def __init__(self, segment: _Segment, offset: int, size: int, pool: int) -> None:
        self.segment, self.offset, self.size, self.pool = segment, offset, size, pool
        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None


class _Segment:
    __slots__ = ("last_used", "number", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.last_used = 0


class CachingAllocator:
    """Allocate and free by block number; the counters are torch.cuda's."""

    def __init__(self, options: AllocatorOptions | None = None, *, capacity_bytes: int | None = None) -> None:
        self.options = options or AllocatorOptions()
        self._plain = not (self.options.expandable_segments or self.options.max_split_bytes or self.options.roundup_power2_divisions)
        self.capacity_bytes = capacity_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.peak_allocated_event = 0
        self._pools: list[list[tuple[int, int, int, _Block]]] = [[], []]  # by 2 × stream + (1 for the small one)
        self._live: dict[int, _Block] = {}
        self._segments = 0
        self._expandable: dict[int, _Block | None] = {}

    # ------------------------------------------------------------------------------------------ requests

    def allocate(self, number: int, request: int, stream: int = 0) -> None:
        plain = self._plain  # most replays: the rules in a line each instead of a call each, which halves their time
        size = -(-request // _MIN_BLOCK) * _MIN_BLOCK or _MIN_BLOCK if plain else self._rounded(request)
        which = 2 * stream + (size <= _SMALL_REQUEST)
        while which >= len(self._pools):
            self._pools.append([])
        pool = self._pools[which]
        at = bisect_left(pool, (size,))
        block = None
        if at < len(pool):
            candidate = pool[at][3]
            if plain or self._usable(candidate, size):
                del pool[at]
                block = candidate
        if block is None:
            block = self._new_block(size, which)
        remaining = block.size - size
        if (remaining > _SMALL_REQUEST or (remaining and which & 1)) if plain else self._should_split(block, remaining, size):
            self._split(block, size)
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
            self._merge(block)
        insort(self._pools[block.pool], (block.size, block.segment.number, block.offset, block))

    # ------------------------------------------------------------------------------------------ rules

    def _rounded(self, size: int) -> int:
        if size < _MIN_BLOCK:
            return _MIN_BLOCK
        divisions = self.options.roundup_power2_divisions
        if divisions and divisions > 1 and size > _MIN_BLOCK * divisions:
            power = 1 << (size.bit_length() - 1)
            if size == power:
                return size
            step = max(power // divisions, 1)
            return -(-size // step) * step
        return -(-size // _MIN_BLOCK) * _MIN_BLOCK

    def _usable(self, block: _Block, size: int) -> bool:
        """get_free_block: with a split limit, a large block is not spent on a small request, nor on one with too much left over."""
        limit = self.options.max_split_bytes
        if limit is None or self.options.expandable_segments:
            return True
        if size < limit and block.size >= limit:
            return False
        return not (size >= limit and block.size >= size + _LARGE_SEGMENT)

    def _should_split(self, block: _Block, remaining: int, size: int) -> bool:
        if block.pool & 1 or self.options.expandable_segments:
            return remaining >= _MIN_BLOCK
        limit = self.options.max_split_bytes
        return remaining > _SMALL_REQUEST and (limit is None or size < limit)

    def _segment_size(self, size: int, small: bool) -> int:
        if small:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if size < _MIN_LARGE else -(-size // _ROUND_LARGE) * _ROUND_LARGE

    # ------------------------------------------------------------------------------------------ segments

    def _new_block(self, size: int, pool: int) -> _Block:
        if self.options.expandable_segments:
            return self._expand(size, pool)
        wanted = self._segment_size(size, bool(pool & 1))
        self._collect_garbage(wanted)
        if not self._fits(wanted):
            self._release_enough(wanted)
            if not self._fits(wanted):
                self._release_cached()
                if not self._fits(wanted):
                    raise OutOfMemory
        self._reserve(wanted)
        return _Block(self._next_segment(wanted), 0, wanted, pool)

    def _expand(self, size: int, pool: int) -> _Block:
        """try_allocate_expandable_block: one growing segment per pool, mapped in pages of 2 or 20 MiB at its end."""
        page = _SMALL_SEGMENT if pool & 1 else _LARGE_SEGMENT
        tail = self._expandable.get(pool)
        have = tail.size if tail is not None and tail.free else 0
        grow = -(-(size - have) // page) * page
        if not self._fits(grow):
            raise OutOfMemory
        self._reserve(grow)
        if tail is None:
            tail = _Block(self._next_segment(0), 0, 0, pool)
        elif tail.free:
            self._take_from_pool(tail)
        else:
            fresh = _Block(tail.segment, tail.offset + tail.size, 0, pool)
            fresh.previous, tail.next = tail, fresh
            tail = fresh
        tail.size += grow
        self._expandable[pool] = tail
        return tail

    def _next_segment(self, size: int) -> _Segment:
        """Of equal blocks the one of the oldest segment is taken (pytorch#183591); before 2.13 the one at the lowest address, and the
        driver hands out addresses downwards."""
        self._segments += 1 if self.options.torch_version >= _OLDEST_SEGMENT_FIRST else -1
        return _Segment(self._segments, size)

    def _fits(self, size: int) -> bool:
        return self.capacity_bytes is None or self.reserved + size <= self.capacity_bytes

    def _reserve(self, size: int) -> None:
        self.reserved += size
        if self.reserved > self.peak_reserved:
            self.peak_reserved = self.reserved

    def _whole(self, block: _Block) -> bool:
        return block.previous is None and block.next is None

    def _give_back(self, block: _Block) -> None:
        self._take_from_pool(block)
        self.reserved -= block.size

    def _release_enough(self, size: int) -> None:
        """release_available_cached_blocks: only with a split limit; the smallest oversize segment that suffices, else the largest ones."""
        limit = self.options.max_split_bytes
        if limit is None:
            return
        need = max(size, limit)
        oversize = [block for _, _, _, block in self._large_blocks() if self._whole(block) and block.size >= limit]
        enough = next((block for block in oversize if block.size >= need), None)
        if enough is not None:
            self._give_back(enough)
            return
        freed = 0
        for block in reversed(oversize):
            if freed >= need:
                break
            freed += block.size
            self._give_back(block)

    def _large_blocks(self) -> list[tuple[int, int, int, _Block]]:
        """Cached blocks of every stream's large pool, the smallest first."""
        return sorted((entry for pool in self._pools[::2] for entry in pool), key=lambda entry: entry[:3])

    def _release_cached(self) -> None:
        """release_cached_blocks: every segment without a live block."""
        for pool in self._pools:
            for _, _, _, block in [entry for entry in pool if self._whole(entry[3])]:
                self._give_back(block)

    def _collect_garbage(self, size: int) -> None:
        """garbage_collect_cached_blocks, without the ages: the largest cached segments go first."""
        threshold = self.options.garbage_collection_threshold
        if not threshold or self.capacity_bytes is None:
            return
        limit = int(threshold * self.capacity_bytes)
        if self.reserved <= limit:
            return
        for _, _, _, block in reversed([entry for entry in self._large_blocks() if self._whole(entry[3])]):
            if self.reserved <= limit:
                return
            self._give_back(block)

    # ------------------------------------------------------------------------------------------ blocks

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.segment, block.offset + size, block.size - size, block.pool)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        block.next, block.size = rest, size
        if self._expandable and self._expandable.get(block.pool) is block:
            self._expandable[block.pool] = rest
        insort(self._pools[block.pool], (rest.size, rest.segment.number, rest.offset, rest))

    def _merge(self, block: _Block) -> None:
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._take_from_pool(before)
            block.offset, block.size = before.offset, block.size + before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free:
            self._take_from_pool(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
            if self._expandable and self._expandable.get(block.pool) is after:
                self._expandable[block.pool] = block

    def _take_from_pool(self, block: _Block) -> None:
        pool = self._pools[block.pool]
        del pool[bisect_left(pool, (block.size, block.segment.number, block.offset))]
