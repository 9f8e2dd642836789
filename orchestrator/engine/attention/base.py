"""One signature for every attention backend, and what a step tells it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from orchestrator.engine.kv_cache import pad_tables, slots_of


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
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    query_starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def build(
        cls, spans: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int, torch_device: str
    ) -> AttentionMetadata:
        """From the new positions (start, stop) of each sequence and its block table."""
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
        )


class AttentionBackend(ABC):
    """Causal attention of a step's new tokens on everything before them.

    Attributes:
        name: in the registry.
        devices: kinds of devices it runs on; empty for any.
        dtypes: names of the element types it takes; empty for any.
        head_sizes: head sizes it takes; empty for any.
        graph_safe: whether a call with fixed shapes can be captured in a CUDA graph.
    """

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    head_sizes: ClassVar[frozenset[int]] = frozenset()
    graph_safe: ClassVar[bool] = False

    @classmethod
    def refusal(cls, device: str, dtype: str, head_size: int) -> str | None:
        """Why this backend cannot serve such a model on such a device; None if it can."""
        for what, value, allowed in (
            ("devices of kind", device, cls.devices),
            ("the element type", dtype, cls.dtypes),
            ("heads of size", head_size, cls.head_sizes),
        ):
            if allowed and value not in allowed:
                return f"it does not take {what} {value}, only {', '.join(str(item) for item in sorted(allowed))}"
        return None

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
