"""The paged KV cache: one storage of blocks, the pool that hands them out, and the arithmetic of slots.

Block 0 belongs to nobody: rows that only pad a step write there and dummy steps read there. Blocks 1 to `num_blocks`
are for requests. A slot is the row of one token in a layer: `block * block_size + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.engine.base import KVSpec
from orchestrator.errors import OrchestratorError

if TYPE_CHECKING:
    import torch

PADDING_BLOCK = 0


class BlockError(OrchestratorError):
    """A block that was taken or given back against the rules: a defect of the caller, not of a request."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens of one sequence."""
    return -(-num_tokens // block_size)


def slots_of(block_table: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Slots of the positions `start` to `stop` (exclusive) of a sequence.

    Raises:
        BlockError: the block table ends before `stop`.
    """
    if stop > len(block_table) * block_size:
        raise BlockError(f"position {stop - 1} lies beyond {len(block_table)} blocks of {block_size} tokens")
    return [block_table[at // block_size] * block_size + at % block_size for at in range(start, stop)]


def pad_tables(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Block tables of equal length: the shorter ones end in the padding block."""
    width = max((len(table) for table in tables), default=0)
    return [[*table, *[PADDING_BLOCK] * (width - len(table))] for table in tables]


class BlockPool:
    """Which of the blocks 1 to `num_blocks` are free. Hands out the lowest numbers of a fresh pool first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
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
    (layers, 2, num_blocks + 1, block_size, kv_heads, head_dim)."""

    def __init__(self, storage: torch.Tensor) -> None:
        self.storage = storage

    @classmethod
    def allocate(cls, spec: KVSpec, num_blocks: int, block_size: int, torch_device: str) -> KVCache:
        """A cache of `num_blocks` usable blocks and the padding block, filled with zeros: written memory is resident
        on a CPU, and what a request reads beyond its own tokens is never NaN."""
        import torch

        shape = (spec.num_layers, 2, num_blocks + 1, block_size, spec.num_kv_heads, spec.head_dim)
        return cls(torch.empty(shape, dtype=getattr(torch, spec.dtype), device=torch_device).zero_())

    @classmethod
    def padding_only(cls, spec: KVSpec, block_size: int, torch_device: str) -> KVCache:
        """What dummy steps write to and read from: the padding block alone."""
        return cls.allocate(spec, 0, block_size, torch_device)

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use."""
        return self.storage.shape[2] - 1

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    @property
    def bytes(self) -> int:
        return self.storage.numel() * self.storage.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each (num_blocks + 1, block_size, kv_heads, head_dim)."""
        keys, values = self.storage[index].unbind(0)
        return keys, values

    def write(self, index: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put `key` and `value`, each (tokens, kv_heads, head_dim), into the slots of a layer."""
        for target, source in zip(self.layer(index), (key, value), strict=True):
            target.flatten(0, 1).index_copy_(0, slots, source.to(target.dtype))
