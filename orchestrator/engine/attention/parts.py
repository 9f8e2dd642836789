"""How the Triton backend divides a step over kernels; without Triton, so that a plan divides it by the same code."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.nn.functional import pad

from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.reference import dense

LONG = 2048
"""New tokens from which on PyTorch's own kernel is faster than ours on a sequence without context."""
_STEP = 512
"""Lengths that PyTorch's kernel is called with: multiples of so many. cuDNN plans each new length for 50 ms (H200,
torch 2.11), and is twice as fast as the kernel that plans nothing."""
PROGRAMS = 264
"""Decode programs to aim for: two for each multiprocessor of a large card."""


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Parts of a sequence's keys: one where heads and sequences already fill the device, else 4, 16 or 32. A function
    of the shape alone, so that a captured call and a new one agree; and few values, because each is compiled by itself.
    """
    wanted = PROGRAMS / (num_seqs * num_kv_heads)
    return next((splits for splits in (1, 4, 16) if wanted <= splits), 32)


def prefills(meta: AttentionMetadata, first: int) -> Iterator[tuple[int, int, bool]]:
    """Ranges of the sequences from `first` on, and whether a range is one long sequence that is new as a whole."""
    pending = first
    for index in range(first, meta.num_seqs):
        fresh = meta.query_starts[index + 1] - meta.query_starts[index]
        if fresh >= LONG and fresh == meta.lengths[index] and (meta.window is None or meta.window >= fresh):
            if pending < index:
                yield pending, index, False
            yield index, index + 1, True
            pending = index + 1
    if pending < meta.num_seqs:
        yield pending, meta.num_seqs, False


def is_one_new_sequence(meta: AttentionMetadata) -> bool:
    """Whether a step is a single long sequence without context: then nothing has to be put together."""
    return meta.num_seqs == 1 and not meta.num_decodes and next(prefills(meta, 0))[2]


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of a sequence without context, by PyTorch's own kernel; all (tokens, heads, head size)."""
    tokens = query.shape[0]
    # Rows behind the last one are seen by none before them.
    extra = -tokens % _STEP
    if extra:
        query, key, value = (pad(tensor, (0, 0, 0, 0, 0, extra)) for tensor in (query, key, value))
    return dense(query, key, value, scale, causal=True)[:tokens]


def partial_sums(query: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what each part of a row's keys gives, in float32: outputs (rows, heads, splits, head size), and the
    maximum and the sum of each (rows, heads, splits, 2)."""
    rows, heads, width = query.shape
    parts = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=query.device)
    return parts, torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=query.device)


class DividedAttention(AttentionBackend):
    """`triton` but for its kernels: what takes which way, and where the outputs go."""

    name: ClassVar[str] = "triton"
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "float16", "bfloat16"})
    graph_safe: ClassVar[bool] = True
    abilities: ClassVar[frozenset[str]] = frozenset({WINDOW})
    new_apart: ClassVar[bool] = True

    @classmethod
    def refusal(cls, device: str, dtype: str, head_size: int, block_size: int | None = None) -> str | None:
        if not 16 <= head_size <= 256:
            return f"it takes heads of size 16 to 256, not {head_size}"
        return super().refusal(device, dtype, head_size, block_size)

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
        if is_one_new_sequence(meta):
            return whole(query, key, value, scale)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        decodes = meta.num_decodes
        if decodes:
            self._decode(query[:decodes], k_cache, v_cache, meta, scale, output)
        for first, stop, by_itself in prefills(meta, decodes):
            if by_itself:
                rows = slice(meta.query_starts[first], meta.query_starts[stop])
                output[rows] = whole(query[rows], key[rows], value[rows], scale)
            else:
                self._prefill(query, k_cache, v_cache, meta, first, stop, scale, output)
        return output

    @abstractmethod
    def _decode(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """The step's first rows, one a sequence, into the first rows of `output` (T, heads, head size)."""

    @abstractmethod
    def _prefill(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        first: int,
        stop: int,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """The sequences `first` to `stop` (exclusive), with any number of new tokens."""
