"""The caching allocator, replayed: traces worked out by hand."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from orchestrator.errors import DeviceOutOfMemoryError
from orchestrator.memory.allocator import Block, CachingAllocator, Mode, rounded
from orchestrator.units import GiB, MiB

MODES: tuple[Mode, ...] = ("expandable", "native")


def _new(mode: Mode) -> CachingAllocator:
    return CachingAllocator(mode, 80 * GiB)


@pytest.mark.parametrize(("size", "block"), [(0, 512), (1, 512), (512, 512), (513, 1024), (3 * MiB, 3 * MiB)])
def test_sizes_come_in_steps(size: int, block: int) -> None:
    assert rounded(size) == block


@pytest.mark.parametrize("mode", MODES)
def test_small_and_large_requests_have_segments_of_their_own(mode: Mode) -> None:
    allocator = _new(mode)
    allocator.allocate(MiB)
    assert allocator.reserved_bytes == 2 * MiB
    allocator.allocate(MiB + 1)
    assert allocator.reserved_bytes == 22 * MiB
    assert allocator.allocated_bytes == 2 * MiB + 512


@pytest.mark.parametrize("mode", MODES)
def test_what_is_freed_is_used_again(mode: Mode) -> None:
    allocator = _new(mode)
    first = allocator.allocate(5 * MiB)
    allocator.free(first)
    allocator.allocate(5 * MiB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.peak_bytes) == (5 * MiB, 20 * MiB, 5 * MiB)


def test_segments_of_fixed_size_round_large_requests_to_two_mib() -> None:
    allocator = _new("native")
    allocator.allocate(33 * MiB)
    assert allocator.reserved_bytes == 34 * MiB
    # What is left of a segment is cut off only where it is more than 1 MiB: the block has it all.
    assert allocator.allocated_bytes == 34 * MiB


def test_a_segment_that_expands_grows_by_pages_from_its_free_end() -> None:
    allocator = _new("expandable")
    allocator.allocate(30 * MiB)
    assert allocator.reserved_bytes == 40 * MiB
    # 10 MiB are free at the end, so 25 MiB need 15 more.
    allocator.allocate(25 * MiB)
    assert allocator.reserved_bytes == 60 * MiB
    assert allocator.allocated_bytes == 55 * MiB


def test_free_neighbours_become_one() -> None:
    allocator = _new("expandable")
    blocks = [allocator.allocate(20 * MiB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    allocator.allocate(60 * MiB)
    assert allocator.reserved_bytes == 60 * MiB


def test_the_smallest_block_that_fits_is_taken_and_the_end_last() -> None:
    allocator = _new("expandable")
    hole, _, end = (allocator.allocate(size * MiB) for size in (8, 4, 6))
    allocator.free(end)
    allocator.free(hole)
    # 8 MiB at the end would fit as well, but the end may still grow.
    assert allocator.allocate(7 * MiB).address == 0


@pytest.mark.parametrize(("mode", "left"), [("expandable", 20), ("native", 60)])
def test_empty_cache_gives_back_whole_free_pages(mode: Mode, left: int) -> None:
    allocator = _new(mode)
    whole = allocator.allocate(60 * MiB)
    allocator.free(whole)
    kept = allocator.allocate(2 * MiB)
    assert allocator.reserved_bytes == 60 * MiB
    allocator.empty_cache()
    # A segment of fixed size goes back whole or not at all.
    assert allocator.reserved_bytes == left * MiB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_page_in_the_middle_is_unmapped_and_mapped_again() -> None:
    allocator = _new("expandable")
    first, middle, last = (allocator.allocate(20 * MiB) for _ in range(3))
    allocator.free(middle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 40 * MiB
    again = allocator.allocate(15 * MiB)
    assert again.address == first.address + 20 * MiB
    assert allocator.reserved_bytes == 60 * MiB
    allocator.free(last)
    # The free end of the middle page and the last page are one block now.
    allocator.allocate(25 * MiB)
    assert allocator.reserved_bytes == 60 * MiB


def test_peaks_are_since_the_last_reset() -> None:
    allocator = _new("expandable")
    allocator.free(allocator.allocate(100 * MiB))
    allocator.empty_cache()
    assert (allocator.peak_bytes, allocator.peak_reserved_bytes) == (100 * MiB, 100 * MiB)
    allocator.reset_peak()
    allocator.allocate(10 * MiB)
    assert (allocator.peak_bytes, allocator.peak_reserved_bytes) == (10 * MiB, 20 * MiB)


def test_streams_and_pools_do_not_share_blocks() -> None:
    allocator = _new("expandable")
    pool = object()
    allocator.free(allocator.allocate(10 * MiB))
    allocator.free(allocator.allocate(10 * MiB, stream=1))
    allocator.free(allocator.allocate(10 * MiB, pool=pool))
    assert allocator.reserved_bytes == 60 * MiB
    allocator.empty_cache()
    # Graphs hold the addresses of their pool.
    assert allocator.reserved_bytes == 20 * MiB
    allocator.allocate(10 * MiB, pool=pool)
    assert allocator.reserved_bytes == 20 * MiB


@pytest.mark.parametrize("mode", MODES)
def test_a_cap_is_kept_by_giving_back_first_and_then_refusing(mode: Mode) -> None:
    allocator = _new(mode)
    allocator.most_bytes = 50 * MiB
    first = allocator.allocate(2 * MiB)
    allocator.free(allocator.allocate(24 * MiB))
    allocator.allocate(26 * MiB)
    assert allocator.reserved_bytes <= 50 * MiB
    with pytest.raises(DeviceOutOfMemoryError, match="tried to allocate 41943040 bytes"):
        allocator.allocate(40 * MiB)
    allocator.free(first)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_whatever_the_order_nothing_is_lost(mode: Mode, seed: int) -> None:
    allocator, chance = _new(mode), random.Random(seed)
    live: list[Block] = []
    for _ in range(2000):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(allocator.allocate(chance.choice((700, 40_000, 3 * MiB, 17 * MiB, 90 * MiB))))
        if chance.random() < 0.02:
            allocator.empty_cache()
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert sum(block.size for block in live) == allocator.allocated_bytes <= allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0
