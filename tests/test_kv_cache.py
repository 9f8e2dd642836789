from __future__ import annotations

import pytest
import torch

from orchestrator.device.fake import FakeDevice
from orchestrator.engine.base import KVSpec
from orchestrator.engine.kv_cache import (
    PADDING_BLOCK,
    BlockError,
    BlockPool,
    KVCache,
    blocks_for,
    pad_tables,
    slots_of,
)
from orchestrator.errors import DeviceOutOfMemoryError

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32", dtype_bytes=4)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_slots_follow_the_block_table() -> None:
    assert slots_of([5, 2], 2, 6, 4).tolist() == [22, 23, 8, 9]


def test_a_position_beyond_the_block_table_is_refused() -> None:
    with pytest.raises(BlockError, match="position 8 lies beyond 2 blocks"):
        slots_of([5, 2], 0, 9, 4)


def test_tables_are_padded_with_the_padding_block() -> None:
    assert pad_tables([[3], [1, 2, 4], []]).tolist() == [[3, 0, 0], [1, 2, 4], [0, 0, 0]]


def test_the_pool_hands_out_every_block_but_the_padding_block() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert PADDING_BLOCK == 0


def test_the_pool_refuses_more_than_is_free_and_keeps_what_it_has() -> None:
    pool = BlockPool(3)
    with pytest.raises(BlockError, match="4 blocks are wanted and 3 of 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize("stray", [[1, 1], [0], [2], [7]])
def test_a_block_is_given_back_once(stray: list[int]) -> None:
    pool = BlockPool(3)
    taken = pool.allocate(1)
    with pytest.raises(BlockError):
        pool.free([*taken, *stray])
    assert pool.num_free == 2
    pool.free(taken)
    assert pool.num_free == 3
    with pytest.raises(BlockError):
        pool.free(taken)


def test_the_cache_has_the_bytes_of_its_blocks_and_the_padding_block() -> None:
    cache = KVCache.allocate(SPEC, 5, 16, "cpu")
    assert cache.bytes == 6 * SPEC.bytes_per_block(16)
    assert (cache.num_blocks, cache.block_size) == (5, 16)
    assert not cache.storage.any()


def test_padding_only_has_one_block() -> None:
    cache = KVCache.padding_only(SPEC, 16, "cpu")
    assert cache.num_blocks == 0
    assert cache.bytes == SPEC.bytes_per_block(16)


def test_a_write_lands_in_its_slots_of_its_layer_alone() -> None:
    cache = KVCache.allocate(SPEC, 2, 4, "cpu")
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    rows = cache.rows(torch.tensor([5, 6, 11]))
    cache.write(1, rows, key, value)
    keys, values = cache.layer(1)
    assert torch.equal(keys[1, 1:3], key[:2])
    assert torch.equal(values[2, 3], value[2])
    assert not cache.layer(0)[0].any()
    cache.write(1, rows, torch.zeros_like(key), torch.zeros_like(value))
    assert not cache.storage.any()


def test_a_reserved_cache_grows_by_whole_blocks_and_keeps_what_it_has() -> None:
    size = SPEC.bytes_per_block(4)
    device = FakeDevice(100 * size, granularity=3 * size)
    cache = KVCache.reserve(SPEC, 50, 4, device)
    assert (cache.num_blocks, cache.bytes) == (0, 3 * size)
    cache.storage[0].fill_(7.0)
    cache.grow(10)
    assert (cache.num_blocks, cache.bytes) == (10, 12 * size)
    assert bool((cache.storage[0] == 7.0).all()) and not cache.storage[1:11].any()
    assert device.snapshot().ours_bytes == 12 * size
    cache.close()
    cache.close()
    assert device.snapshot().ours_bytes == 0


def test_a_cache_that_cannot_grow_is_as_it_was() -> None:
    size = SPEC.bytes_per_block(4)
    cache = KVCache.reserve(SPEC, 50, 4, FakeDevice(10 * size, granularity=size))
    with pytest.raises(DeviceOutOfMemoryError):
        cache.grow(20)
    assert (cache.num_blocks, cache.bytes) == (0, size)
    with pytest.raises(BlockError, match="reserved addresses"):
        KVCache.padding_only(SPEC, 4, "cpu").grow(1)
