"""The paged KV cache: one storage of blocks, the pool that hands them out, and the arithmetic of slots.

Block 0 belongs to nobody: rows that only pad a step write there and dummy steps read there. Blocks 1 to `num_blocks`
are for requests. A slot is the row of one token in a layer: `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.device.base import Device, Reserved
from orchestrator.engine.base import KVSpec
from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    import torch

PADDING_BLOCK = 0

Int32s = np.ndarray[Any, np.dtype[np.int32]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class BlockError(OrchestratorError):
    """A block that was taken or given back against the rules: a defect of the caller, not of a request."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def slots_of(block_table: Sequence[int], start: int, stop: int, block_size: int) -> Int64s:
    """Slots of the positions `start` to `stop` (exclusive) of a sequence.

    Raises:
        BlockError: the block table ends before `stop`.
    """
    if stop > len(block_table) * block_size:
        raise BlockError(f"position {stop - 1} lies beyond {len(block_table)} blocks of {block_size} tokens")
    first = start // block_size
    blocks = np.asarray(block_table[first : blocks_for(stop, block_size)], np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : stop - first * block_size]


def pad_tables(tables: Sequence[Sequence[int]]) -> Int32s:
    """Block tables as rows of equal length: the shorter ones end in the padding block."""
    padded = np.full((len(tables), max((len(table) for table in tables), default=0)), PADDING_BLOCK, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


class BlockPool:
    """Which of the blocks 1 to `num_blocks` are free. Hands out the lowest numbers of a fresh pool first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.most_taken = 0
        """The highest number of blocks that were taken at once."""
        self._free = list(range(num_blocks, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks.

        Raises:
            BlockError: fewer are free.
        """
        if count > len(self._free):
            raise BlockError(f"{count} blocks are wanted and {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        self.most_taken = max(self.most_taken, len(self._taken))
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; all of them or, on an error, none.

        Raises:
            BlockError: a block is not taken, or named twice.
        """
        stray = sorted(set(blocks) - self._taken)
        if stray or len(set(blocks)) != len(blocks):
            raise BlockError(f"blocks {list(blocks)} cannot be given back: {stray or 'some'} not taken or named twice")
        self._taken.difference_update(blocks)
        self._free.extend(reversed(blocks))


class KVCache:
    """Keys and values of all layers, over one storage of shape
    (num_blocks + 1, layers, 2, block_size, kv_heads, head_dim).

    The block comes first, so that a block of all layers is contiguous: a cache whose memory is mapped piece by piece
    grows by whole blocks at its end, each of which every layer can use at once.

    Args:
        storage: may have more blocks than have memory.
        num_blocks: usable blocks that have memory, the padding block not counted; None for all of `storage`.
        reserved: the addresses that `storage` lies in, if memory is mapped into them later.
    """

    def __init__(self, storage: torch.Tensor, num_blocks: int | None = None, reserved: Reserved | None = None) -> None:
        self.storage = storage
        self.num_blocks = storage.shape[0] - 1 if num_blocks is None else num_blocks
        self._reserved = reserved

    @classmethod
    def allocate(cls, spec: KVSpec, num_blocks: int, block_size: int, torch_device: str) -> KVCache:
        """A cache of `num_blocks` usable blocks and the padding block, filled with zeros: written memory is resident
        on a CPU, and what a request reads beyond its own tokens is never NaN."""
        import torch

        dtype = getattr(torch, spec.dtype)
        return cls(torch.empty(_shape(spec, num_blocks, block_size), dtype=dtype, device=torch_device).zero_())

    @classmethod
    def padding_only(cls, spec: KVSpec, block_size: int, torch_device: str) -> KVCache:
        """What dummy steps write to and read from: the padding block alone."""
        return cls.allocate(spec, 0, block_size, torch_device)

    @classmethod
    def reserve(cls, spec: KVSpec, most_blocks: int, block_size: int, device: Device) -> KVCache:
        """A cache with addresses for `most_blocks` blocks, of which only the padding block has memory."""
        reserved = device.reserve((most_blocks + 1) * spec.bytes_per_block(block_size))
        try:
            reserved.grow(spec.bytes_per_block(block_size))
            storage = reserved.tensor(spec.dtype, _shape(spec, most_blocks, block_size))
            storage[0].zero_()
        except BaseException:
            reserved.close()
            raise
        return cls(storage, 0, reserved)

    def grow(self, num_blocks: int) -> None:
        """Give memory, filled with zeros, to the addresses of the first `num_blocks` usable blocks.

        Raises:
            BlockError: the cache is not over reserved addresses.
            DeviceOutOfMemoryError: the device has not so much left; the cache is as it was.
        """
        if self._reserved is None:
            raise BlockError("only a cache over reserved addresses can grow")
        self._reserved.grow((num_blocks + 1) * self._bytes_per_block)
        self.storage[self.num_blocks + 1 : num_blocks + 1].zero_()
        self.num_blocks = max(self.num_blocks, num_blocks)

    def bytes_for(self, num_blocks: int) -> int:
        """What `bytes` is with so many usable blocks."""
        size = (num_blocks + 1) * self._bytes_per_block
        return size if self._reserved is None else self._reserved.rounded(size)

    def close(self) -> None:
        """Give the memory back; the tensors over it must not be used any more. May be called again."""
        if self._reserved is not None:
            self._reserved.close()

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    @property
    def _bytes_per_block(self) -> int:
        return self.storage[0].numel() * self.storage.element_size()

    @property
    def bytes(self) -> int:
        """Of device memory; mapped memory comes in the device's granularity."""
        return self.bytes_for(self.num_blocks)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (blocks, block_size, kv_heads, head_dim); only blocks with memory may be
        read or written."""
        keys, values = self.storage[:, index].unbind(1)
        return keys, values

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Where slots lie in layer 0's keys, for `write`: the same for all layers of a step."""
        _, layers, parts, block_size, _, _ = self.storage.shape
        return slots // block_size * (layers * parts * block_size) + slots % block_size

    def write(self, index: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `key` and `value`, each (tokens, kv_heads, head_dim), into a layer's slots, given as `rows`."""
        flat = self.storage.view(-1, *self.storage.shape[4:])
        for part, source in enumerate((key, value)):
            flat[(2 * index + part) * self.block_size :].index_copy_(0, rows, source.to(flat.dtype))


def _shape(spec: KVSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    return num_blocks + 1, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim
