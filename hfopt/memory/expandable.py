"""Expandable segments: one for each pool, backed with memory page by page where a request needs it, and unmapped when memory runs out.

Mirrors get_free_block, find_expandable_block, map_block and unmap_block of c10/cuda/CUDACachingAllocator.cpp. Its addresses never end
here; PyTorch reserves those of 1 1/8 cards and begins another segment after them.
"""

from __future__ import annotations

from hfopt.memory.blocks import LARGE_SEGMENT, SMALL_SEGMENT, Block, Blocks

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
