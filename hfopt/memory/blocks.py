"""Device memory in blocks: every segment a chain of them, the free ones in two ordered pools for each stream, and what is reserved."""

from __future__ import annotations

from bisect import bisect_left, insort

from hfopt.units import MIB

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
