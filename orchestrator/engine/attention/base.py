"""One signature for every attention backend, and what a step tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from orchestrator.engine.kv_cache import Int32s, Int64s, pad_tables, slots_of
from orchestrator.engine.upload import Uploader

WINDOW = "attention within a window"
BOTH_WAYS = "attention both ways inside an image"
"""What some models need beyond causal attention on everything."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the B sequences of a flattened step of T tokens lie, in the step and in the cache.

    Attributes:
        query_start_loc: (B + 1), int32; sequence i has the step's rows `query_start_loc[i]` to `query_start_loc[i+1]`.
        seq_lens: (B), int32; tokens of a sequence, the new ones included.
        block_tables: (B, blocks), int32; ends in the padding block where a sequence has fewer.
        slot_mapping: (T), int64; where each new token's key and value go.
        max_query_len: new tokens of the longest sequence.
        max_seq_len: the largest of `seq_lens`.
        query_starts: `query_start_loc`, on the host.
        lengths: `seq_lens`, on the host.
        window: how many tokens, itself included, a token looks back; None for all.
        both_ways: for each sequence, spans (start, stop) of positions that look at each other whatever their order; a
            step holds each span whole, or it lies in the past. Empty where no sequence has any.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_starts: tuple[int, ...]
    lengths: tuple[int, ...]
    window: int | None = None
    both_ways: tuple[tuple[tuple[int, int], ...], ...] = ()

    @property
    def num_seqs(self) -> int:
        return self.block_tables.shape[0]

    @cached_property
    def num_decodes(self) -> int:
        """How many of the first sequences have one new token; a step's decodes come before its prefills."""
        steps = zip(self.query_starts, self.query_starts[1:], strict=False)
        return next((index for index, (start, stop) in enumerate(steps) if stop - start > 1), self.num_seqs)

    @classmethod
    def build(
        cls,
        spans: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[int]],
        block_size: int,
        torch_device: str,
        both_ways: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> AttentionMetadata:
        """Of a `Layout`, by itself on the device."""
        layout = Layout.of(spans, tables, block_size, both_ways)
        return layout.metadata(Uploader(torch_device)(*layout.arrays))


@dataclass(frozen=True)
class Layout:
    """What becomes the metadata of a step, on the host; shapes as there."""

    query_starts: Int32s
    lengths: Int32s
    block_tables: Int32s
    slots: Int64s
    both_ways: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        tables: Sequence[Sequence[int]],
        block_size: int,
        both_ways: Sequence[Sequence[tuple[int, int]]] = (),
    ) -> Layout:
        """From the new positions (start, stop) of each sequence, its block table and its spans that look both ways, of
        which those without a new position are left out.

        Raises:
            BlockError: a block table ends before its sequence.
        """
        touched = (
            tuple(
                tuple(run for run in runs if run[1] > start) for runs, (start, _) in zip(both_ways, spans, strict=True)
            )
            if any(both_ways)
            else ()
        )
        starts, stops = np.asarray(spans, np.int32).reshape(-1, 2).T
        slots = [slots_of(table, start, stop, block_size) for (start, stop), table in zip(spans, tables, strict=True)]
        return cls(
            query_starts=np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32),
            lengths=stops,
            block_tables=pad_tables(tables),
            slots=np.concatenate(slots),
            both_ways=touched if any(touched) else (),
        )

    @property
    def arrays(self) -> tuple[Int32s, Int32s, Int32s, Int64s]:
        """What the device needs to know."""
        return self.query_starts, self.lengths, self.block_tables, self.slots

    def metadata(self, on_device: Sequence[torch.Tensor]) -> AttentionMetadata:
        """With `arrays` on the device."""
        query_start_loc, seq_lens, block_tables, slot_mapping = on_device
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            max_query_len=int(np.diff(self.query_starts).max()),
            max_seq_len=int(self.lengths.max()),
            query_starts=tuple(self.query_starts.tolist()),
            lengths=tuple(self.lengths.tolist()),
            both_ways=self.both_ways,
        )


@dataclass(frozen=True)
class AttentionShape:
    """What kernels are compiled for: numbers of heads, the size of one, tokens of a block, names of element types."""

    heads: int
    kv_heads: int
    head_size: int
    block_size: int
    dtype: str
    kv_dtype: str
    window: int | None = None


class AttentionBackend(ABC):
    """Causal attention of a step's new tokens on everything before them.

    Attributes:
        name: in the registry.
        devices: kinds of devices it runs on; empty for any.
        dtypes: names of the element types it takes; empty for any.
        head_sizes: head sizes it takes; empty for any.
        graph_safe: whether a call with fixed shapes can be captured in a CUDA graph.
        abilities: which of `WINDOW` and `BOTH_WAYS` it heeds in the metadata.
        new_apart: whether a sequence without context takes another way, with memory of its own.
    """

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    head_sizes: ClassVar[frozenset[int]] = frozenset()
    graph_safe: ClassVar[bool] = False
    abilities: ClassVar[frozenset[str]] = frozenset()
    new_apart: ClassVar[bool] = False

    @classmethod
    def refusal(cls, device: str, dtype: str, head_size: int, block_size: int | None = None) -> str | None:
        """Why this backend cannot serve such a model on such a device, with blocks of so many tokens; None if it can.
        With None the blocks are left out of account."""
        for what, value, allowed in (
            ("devices of kind", device, cls.devices),
            ("the element type", dtype, cls.dtypes),
            ("heads of size", head_size, cls.head_sizes),
        ):
            if allowed and value not in allowed:
                return f"it does not take {what} {value}, only {', '.join(str(item) for item in sorted(allowed))}"
        return None

    @classmethod
    def lacks(cls, needs: frozenset[str]) -> str | None:
        """Why this backend cannot serve a model that needs those abilities; None if it can."""
        missing = sorted(needs - cls.abilities)
        return f"the model needs {' and '.join(missing)}, which it does not have" if missing else None

    def warm_up(self, shape: AttentionShape, torch_device: str) -> None:
        """Compile what calls of this shape will launch. Leaves nothing but the kernels."""
        return

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
    ) -> torch.Tensor:
        """Attention of a step whose keys and values are in the cache already.

        Args:
            query: (T, query heads, head size).
            key: (T, kv heads, head size), the new tokens'.
            value: as `key`.
            k_cache: (blocks, block size, kv heads, head size).
            v_cache: as `k_cache`.
            meta: where the sequences lie.
            scale: factor of the scores.

        Returns:
            (T, query heads, head size).
        """
