"""torch's caching allocator for CUDA, replayed without a device: what it reserves for a sequence of tensors.

The rules are those of torch 2.11's allocator (c10/cuda/CUDACachingAllocator.cpp): sizes in steps of 512 B; requests of
up to 1 MiB in a pool of their own; the smallest free block that fits, split where enough is left; neighbours that are
free become one. Where segments expand, each pool and stream has a range of addresses of which pages of 2 MiB (small) or
20 MiB (large) are mapped as they are needed, and whole free pages are unmapped by `empty_cache`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.units import MiB

STEP = 512
SMALL = MiB
"""The largest request that goes to the pool of small blocks."""
_SMALL_PAGE, LARGE_PAGE = 2 * MiB, 20 * MiB
_LEAST_LARGE = 10 * MiB
"""From here on a segment of fixed size is as large as the request, in steps of 2 MiB."""
_ROUND_LARGE = 2 * MiB

Mode = Literal["expandable", "native"]


def rounded(size: int) -> int:
    """Bytes of the block that a request of `size` bytes gets."""
    return max(STEP, _up(size, STEP))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(eq=False)
class Block:
    """A piece of a segment. `mapped` is false where an expanding segment has addresses and no memory."""

    size: int
    address: int
    bin: Bin
    mapped: bool = True
    allocated: bool = False
    before: Block | None = None
    after: Block | None = None

    def __lt__(self, other: Block) -> bool:
        return (self.size, self.address) < (other.size, other.address)

    @property
    def room(self) -> int:
        """What it can grow to: with the addresses behind it."""
        behind = self.after
        return self.size + (behind.size if behind is not None and not behind.mapped else 0)


@dataclass(eq=False)
class Bin:
    """The free blocks of one pool, one stream and one kind of size."""

    small: bool
    free: list[Block] = field(default_factory=list)
    """By size, then address."""
    unmapped: list[Block] = field(default_factory=list)
    """By address."""

    @property
    def page(self) -> int:
        return _SMALL_PAGE if self.small else LARGE_PAGE

    def add(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, block)
        else:
            self.unmapped.insert(self._place(block.address), block)

    def drop(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, block)]
        else:
            del self.unmapped[self._place(block.address)]

    def _place(self, address: int) -> int:
        return bisect_left(self.unmapped, address, key=lambda block: block.address)


class CachingAllocator:
    """Blocks of a device of `total_bytes`, by pool and stream.

    Attributes:
        allocated_bytes: of blocks that are in use; `peak_bytes` is the highest since `reset_peak`.
        reserved_bytes: taken from the device; `peak_reserved_bytes` likewise.
        most_bytes: what may be reserved; None for any amount.
    """

    def __init__(self, mode: Mode, total_bytes: int) -> None:
        self._expands = mode == "expandable"
        # As much as the allocator reserves, so that a segment never ends before the device does.
        self._range = total_bytes + total_bytes // 8
        self._bins: dict[tuple[object, int, bool], Bin] = {}
        self._left: set[object] = set()
        """Pools of graphs that are gone."""
        self._next_address = 0
        self.allocated_bytes = self.peak_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.most_bytes: int | None = None

    def allocate(self, size: int, *, stream: int = 0, pool: object = None) -> Block:
        """A block for `size` bytes.

        Args:
            pool: of a graph; None for the one that everything else shares.

        Raises:
            DeviceOutOfMemoryError: it would reserve more than `most_bytes`, also with every free page given back.
        """
        size = rounded(size)
        small = size <= SMALL
        found = self._bins.setdefault((pool, stream, small), Bin(small))
        block = self._fitting(found, size) or self._grown(found, size)
        if block is None and pool is None:
            self.empty_cache()
            block = self._grown(found, size)
        if block is None:
            raise DeviceOutOfMemoryError(
                f"tried to allocate {size} bytes beside {self.reserved_bytes} that are reserved, of {self.most_bytes}"
            )
        self._split(block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back for reuse."""
        self.allocated_bytes -= block.size
        block.allocated = False
        self._merge(block)
        block.bin.add(block)

    def empty_cache(self) -> None:
        """Give back to the device what no live block holds; a graph's pool keeps its memory until it is left."""
        for (pool, _, _), each in self._bins.items():
            if pool is None or pool in self._left:
                for block in list(each.free):
                    self._give_back(block)

    def leave(self, pool: object) -> None:
        """The graphs of a pool are gone: what it has is given back as everything else is."""
        self._left.add(pool)

    def reset_peak(self) -> None:
        self.peak_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def _fitting(self, found: Bin, size: int) -> Block | None:
        """The best fit. A block at the end of what is mapped counts as large as it could become, so that others go
        first."""
        free = found.free
        at = bisect_left(free, (size, -1), key=lambda block: (block.size, block.address))
        if at == len(free):
            return None
        if self._expands:
            while at + 1 < len(free) and free[at + 1].room < free[at].room:
                at += 1
        return free.pop(at)

    def _grown(self, found: Bin, size: int) -> Block | None:
        """A block of memory that was not reserved before."""
        segment = self._segment_size(size)
        if self.most_bytes is not None and self.reserved_bytes + segment > self.most_bytes:
            return None
        if self._expands:
            return self._mapped(found, size)
        self._reserve(segment)
        return Block(segment, self._addresses(segment), found)

    def _segment_size(self, size: int) -> int:
        if size <= SMALL:
            return _SMALL_PAGE
        return LARGE_PAGE if size < _LEAST_LARGE else _up(size, _ROUND_LARGE)

    def _mapped(self, found: Bin, size: int) -> Block:
        block = next((one for one in self._starts(found) if _reach(one, size)), None)
        if block is None:
            block = Block(self._range, self._addresses(self._range), found, mapped=False)
            found.add(block)
        if not block.mapped:
            self._map(block, min(block.size, size))
        while block.size < size:
            behind = block.after
            assert behind is not None
            self._map(behind, min(size - block.size, behind.size))
            block = behind
        found.drop(block)
        return block

    def _starts(self, found: Bin) -> Iterator[Block]:
        """Where a block may begin that takes in unmapped addresses, the lowest first."""
        for block in found.unmapped:
            before = block.before
            yield before if before is not None and not before.allocated else block

    def _map(self, block: Block, size: int) -> None:
        """Give memory to the beginning of an unmapped block, in whole pages, and join it with free neighbours."""
        page, found = block.bin.page, block.bin
        mapped = _up(block.address + size, page) - block.address
        found.drop(block)
        block.mapped = True
        if mapped < block.size:
            found.add(self._cut(block, mapped, mapped=False))
        self._reserve(mapped)
        self._merge(block)
        found.add(block)

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left >= STEP if block.bin.small or self._expands else left > SMALL:
            block.bin.add(self._cut(block, size, mapped=True))

    def _cut(self, block: Block, size: int, *, mapped: bool) -> Block:
        """Shorten a block; the rest of it, which is in no bin yet."""
        rest = Block(block.size - size, block.address + size, block.bin, mapped, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        return rest

    def _merge(self, block: Block) -> None:
        """Take in free neighbours of the same kind; `block` itself is in no bin."""
        before, after = block.before, block.after
        if before is not None and not before.allocated and before.mapped == block.mapped:
            before.bin.drop(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and not after.allocated and after.mapped == block.mapped:
            after.bin.drop(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block

    def _give_back(self, block: Block) -> None:
        if not self._expands:
            if block.before is None and block.after is None:
                block.bin.drop(block)
                self.reserved_bytes -= block.size
            return
        page, found = block.bin.page, block.bin
        start, stop = _up(block.address, page), (block.address + block.size) // page * page
        if start >= stop:
            return
        found.drop(block)
        if stop < block.address + block.size:
            found.add(self._cut(block, stop - block.address, mapped=True))
        if start > block.address:
            block, kept = self._cut(block, start - block.address, mapped=True), block
            found.add(kept)
        block.mapped = False
        self.reserved_bytes -= block.size
        self._merge(block)
        if block.before is not None or block.after is not None:
            found.add(block)

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _addresses(self, size: int) -> int:
        """The beginning of a new segment: addresses grow, and never meet."""
        address = self._next_address
        self._next_address = _up(address + size, LARGE_PAGE) + LARGE_PAGE
        return address


def _reach(block: Block | None, size: int) -> bool:
    """Whether free and unmapped blocks from this one on have `size` bytes of addresses."""
    while size > 0 and block is not None and not block.allocated:
        size -= block.size
        block = block.after
    return size <= 0
