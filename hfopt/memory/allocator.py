"""PyTorch's CUDA caching allocator as a pure simulation: options, blocks, expandable segments.

PYTORCH_CUDA_ALLOC_CONF, read: what of it changes how memory is taken. Device memory in blocks: every segment a chain of them, the free ones
in two ordered pools for each stream, and what is reserved. Expandable segments: one for each pool, backed with memory page by page where a
request needs it, and unmapped when memory runs out. Mirrors get_free_block, find_expandable_block, map_block and unmap_block of
c10/cuda/CUDACachingAllocator.cpp. Its addresses never end here; PyTorch reserves those of 1 1/8 cards and begins another segment after
them.

PyTorch's CUDA caching allocator as a pure simulation: reserved memory is what runs out, and only this order of events gives it. Mirrors
c10/cuda/CUDACachingAllocator.cpp: 512-byte rounding, a small and a large pool, best fit, splitting, merging, segments of 2 and 20 MiB,
cached segments given back (and the request tried again) before an out-of-memory error. Each stream has its two pools of its own.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from dataclasses import dataclass, field

from hfopt.compat.versions import installed_torch
from hfopt.errors import ConfigError
from hfopt.units import MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorOptions:
    """The allocator's settings, and whose allocator it is; the defaults are those of the installed PyTorch."""

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_power2_divisions: int | None = None  # a power of 2; None: sizes are not rounded between powers of 2
    torch_version: tuple[int, int] = field(default_factory=installed_torch)


def parse_alloc_conf(text: str | None) -> AllocatorOptions:
    """'max_split_size_mb:128,expandable_segments:True' -> options. Keys that do not change sizes are passed over.

    So is garbage_collection_threshold: PyTorch acts on it only in a process that called torch.cuda.set_per_process_memory_fraction.
    """
    found: dict[str, str] = {}
    for item in (text or "").replace(" ", "").split(","):
        key, colon, value = item.partition(":")
        if item and not colon:
            raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF: {item!r} is not of the form key:value")
        found[key] = value
    try:
        split = found.get("max_split_size_mb")
        divisions = found.get("roundup_power2_divisions")
        return AllocatorOptions(
            expandable_segments=found.get("expandable_segments", "").lower() == "true",
            max_split_bytes=int(split) * MIB if split else None,
            roundup_power2_divisions=int(divisions) if divisions and divisions.isdigit() and divisions != "1" else None,
        )
    except ValueError as error:
        raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF: {error}", hint="for example max_split_size_mb:128") from error


# c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp
MIN_BLOCK = 512
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB


class Block:
    """`free` is true as well of addresses without memory behind them: they are not `mapped` and stand in no pool."""

    __slots__ = ("free", "mapped", "next", "offset", "pool", "previous", "segment", "size")

    def __init__(self, segment: int, offset: int, size: int, pool: int) -> None:
        self.segment, self.offset, self.size, self.pool = segment, offset, size, pool
        self.free = self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Is it all of its segment?"""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> Block:
        """Keeps `size` bytes; the rest is a new block behind it."""
        rest = Block(self.segment, self.offset + size, self.size - size, self.pool)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size = rest, size
        return rest


class Blocks:
    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved = self.peak_reserved = 0
        self.pools: list[list[tuple[int, int, int, Block]]] = [[], []]  # by 2 × stream + (1 for the small one)

    def reserve(self, size: int) -> bool:
        """False where the capacity does not allow it."""
        if self.capacity_bytes is not None and self.reserved + size > self.capacity_bytes:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def give_back(self, block: Block) -> None:
        self.take(block)
        self.reserved -= block.size

    def put(self, block: Block) -> None:
        insort(self.pools[block.pool], (block.size, block.segment, block.offset, block))

    def take(self, block: Block) -> None:
        pool = self.pools[block.pool]
        del pool[bisect_left(pool, (block.size, block.segment, block.offset))]

    def merge(self, block: Block) -> None:
        """Takes in the free neighbours of its kind; the block itself stands in no pool."""
        before, after = block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            if before.mapped:
                self.take(before)
            block.offset, block.size = before.offset, block.size + before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.free and after.mapped == block.mapped:
            if after.mapped:
                self.take(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block


_ENDLESS = LARGE_SEGMENT << 30


class ExpandableSegments:
    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.heads: dict[int, Block] = {}  # of each pool, an empty block before the first

    def best(self, pool: list[tuple[int, int, int, Block]], at: int) -> int:
        """A block counts with all it could grow to, so one at the end of the memory is taken last."""
        while at + 1 < len(pool) and _could_be(pool[at + 1][3]) < _could_be(pool[at][3]):
            at += 1
        return at

    def new_block(self, size: int, pool: int) -> Block | None:
        """A free block outside of its pool, from the lowest addresses with room; None when there is no memory for it."""
        block = self._first_with_room(size, pool)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:
            following = _after(block)
            if not self._map(following, size - block.size):
                return None
            block = following
        self.blocks.take(block)
        return block

    def release(self) -> None:
        """Every page that no live block touches."""
        for block in [entry[3] for pool in self.blocks.pools for entry in pool]:
            self._unmap(block)

    def _first_with_room(self, size: int, pool: int) -> Block:
        if pool not in self.heads:
            self.heads[pool] = head = Block(pool, 0, _ENDLESS, pool)
            head.mapped = False
            head.cut(0)
            head.free = False
        block = self.heads[pool]
        while not (block.free and _can_grow(block) and _room(block) >= size):
            block = _after(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        page = _page(block)
        grown = min(-(-size // page) * page, block.size)
        if not self.blocks.reserve(grown):
            return False
        if grown < block.size:
            block.cut(grown)
        block.mapped = True
        self.blocks.merge(block)
        self.blocks.put(block)
        return True

    def _unmap(self, block: Block) -> None:
        page = _page(block)
        start = -(-block.offset // page) * page
        end = (block.offset + block.size) // page * page
        if end <= start:
            return
        self.blocks.take(block)
        if block.offset < start:
            before, block = block, block.cut(start - block.offset)
            self.blocks.put(before)
        if end < block.offset + block.size:
            self.blocks.put(block.cut(end - start))
        self.blocks.reserved -= block.size
        block.mapped = False
        self.blocks.merge(block)


def _page(block: Block) -> int:
    return SMALL_SEGMENT if block.pool & 1 else LARGE_SEGMENT


def _after(block: Block) -> Block:
    assert block.next is not None, "the addresses never end"
    return block.next


def _can_grow(block: Block) -> bool:
    return not block.mapped or not _after(block).mapped


def _could_be(block: Block) -> int:
    return block.size + _after(block).size if _can_grow(block) else block.size


def _room(block: Block) -> int:
    """Bytes without a live block from here on."""
    size, following = block.size, block.next
    while following is not None and following.free:
        size, following = size + following.size, following.next
    return size


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
