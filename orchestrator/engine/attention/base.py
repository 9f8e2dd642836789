"""One signature for every attention backend, and what a step tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from orchestrator.engine.kv_cache import pad_tables, slots_of

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

    @property
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
        """From the new positions (start, stop) of each sequence, its block table and its spans that look both ways, of
        which those without a new position are left out."""
        touched = (
            tuple(
                tuple(run for run in runs if run[1] > start) for runs, (start, _) in zip(both_ways, spans, strict=True)
            )
            if any(both_ways)
            else ()
        )
        starts = [0]
        for start, stop in spans:
            starts.append(starts[-1] + stop - start)
        lengths = [stop for _, stop in spans]
        slots = [
            slot
            for (start, stop), table in zip(spans, tables, strict=True)
            for slot in slots_of(table, start, stop, block_size)
        ]

        def tensor(values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(torch_device)

        return cls(
            query_start_loc=tensor(starts, torch.int32),
            seq_lens=tensor(lengths, torch.int32),
            block_tables=tensor(pad_tables(tables), torch.int32),
            slot_mapping=tensor(slots, torch.int64),
            max_query_len=max(stop - start for start, stop in spans),
            max_seq_len=max(lengths),
            query_starts=tuple(starts),
            lengths=tuple(lengths),
            both_ways=touched if any(touched) else (),
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
    """

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    head_sizes: ClassVar[frozenset[int]] = frozenset()
    graph_safe: ClassVar[bool] = False
    abilities: ClassVar[frozenset[str]] = frozenset()

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
