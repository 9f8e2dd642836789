"""The Triton backend: paged attention on the device's own lengths, which a graph can capture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch
from triton import next_power_of_2

from orchestrator.engine.attention import triton_kernels as kernels
from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata, AttentionShape
from orchestrator.engine.attention.reference import dense
from orchestrator.engine.kv_cache import PADDING_BLOCK

_NO_WINDOW = 1 << 30
_LONG = 512
"""New tokens from which on a sequence is worth a launch of its own."""
_PROGRAMS = 264
"""Decode programs to aim for: two for each multiprocessor of a large card."""


class TritonAttention(AttentionBackend):
    """Sequences with one new token split their keys over programs; those with more take blocks of rows."""

    name: ClassVar[str] = "triton"
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "float16", "bfloat16"})
    graph_safe: ClassVar[bool] = True
    abilities: ClassVar[frozenset[str]] = frozenset({WINDOW})

    @classmethod
    def refusal(cls, device: str, dtype: str, head_size: int, block_size: int | None = None) -> str | None:
        if not 16 <= head_size <= 256:
            return f"it takes heads of size 16 to 256, not {head_size}"
        return super().refusal(device, dtype, head_size, block_size)

    def warm_up(self, shape: AttentionShape, torch_device: str) -> None:
        """See `AttentionBackend`. Triton keeps what it compiled on disk (`~/.triton/cache`, or `TRITON_CACHE_DIR`), so
        that a later process only loads it."""
        dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
        cache = torch.zeros(1, shape.block_size, shape.kv_heads, shape.head_size, dtype=kv_dtype, device=torch_device)
        for spans in _variants(shape.kv_heads):
            meta = AttentionMetadata.build(spans, [[PADDING_BLOCK]] * len(spans), shape.block_size, torch_device)
            tokens = meta.query_starts[-1]
            query = torch.zeros(tokens, shape.heads, shape.head_size, dtype=dtype, device=torch_device)
            new = torch.zeros(tokens, shape.kv_heads, shape.head_size, dtype=dtype, device=torch_device)
            self.attend(query, new, new, cache, cache, meta, shape.head_size**-0.5)

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
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        decodes = meta.num_decodes
        if decodes:
            _decode(query[:decodes], k_cache, v_cache, meta, scale, output)
        for first, stop, whole in _prefills(meta, decodes):
            if whole:
                rows = slice(meta.query_starts[first], meta.query_starts[stop])
                output[rows] = dense(query[rows], key[rows], value[rows], scale, causal=True)
            else:
                _prefill(query, k_cache, v_cache, meta, first, stop, scale, output)
        return output


def _variants(kv_heads: int) -> Iterator[list[tuple[int, int]]]:
    """Steps on one block that launch each kernel there is: decodes with each number of splits, and a prefill."""
    seen: set[int] = set()
    for num_seqs in (1 << power for power in range(_PROGRAMS.bit_length() + 1)):
        splits = num_splits(num_seqs, kv_heads)
        if splits not in seen:
            seen.add(splits)
            yield [(0, 1)] * num_seqs
    yield [(0, 2)]


def _prefills(meta: AttentionMetadata, first: int) -> Iterator[tuple[int, int, bool]]:
    """Ranges of the sequences from `first` on, and whether a range is one long sequence that is new as a whole: for
    that PyTorch's own kernel is twice as fast."""
    pending = first
    for index in range(first, meta.num_seqs):
        fresh = meta.query_starts[index + 1] - meta.query_starts[index]
        if fresh == meta.lengths[index] and fresh >= _LONG and (meta.window is None or meta.window >= fresh):
            if pending < index:
                yield pending, index, False
            yield index, index + 1, True
            pending = index + 1
    if pending < meta.num_seqs:
        yield pending, meta.num_seqs, False


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Parts of a sequence's keys: one where heads and sequences already fill the device, else 4 or 16. A function of
    the shape alone, so that a captured call and a new one agree; and few values, because each is compiled by itself."""
    wanted = _PROGRAMS / (num_seqs * num_kv_heads)
    return 1 if wanted <= 1 else 4 if wanted <= 4 else 16


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _cache_strides(k_cache: torch.Tensor) -> tuple[int, int, int]:
    return k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)


def _decode(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMetadata,
    scale: float,
    output: torch.Tensor,
) -> None:
    """The step's first rows, one a sequence."""
    rows, heads, width = query.shape
    kv_heads = k_cache.shape[2]
    splits, padded = num_splits(rows, kv_heads), next_power_of_2(width)
    partial = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=query.device)
    maxima = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    sums = torch.empty_like(maxima)
    launch: Any = kernels.decode_kernel[(rows, kv_heads, splits)]
    launch(
        query, k_cache, v_cache, meta.block_tables, meta.seq_lens, partial, maxima, sums,
        scale, meta.window or _NO_WINDOW, k_cache.shape[1], width,
        query.stride(0), query.stride(1), *_cache_strides(k_cache), meta.block_tables.stride(0),
        *maxima.stride(),
        GROUP=heads // kv_heads, ROWS=max(16, next_power_of_2(heads // kv_heads)), KEYS=64 if padded <= 128 else 32,
        PADDED=padded, SPLITS=splits, PRECISION=_precision(query.dtype),
    )  # fmt: skip
    combine: Any = kernels.combine_kernel[(rows, heads)]
    combine(
        partial, maxima, sums, output, width, output.stride(0), output.stride(1), maxima.stride(0), maxima.stride(1),
        SPLITS=splits, PADDED=padded,
    )  # fmt: skip


def _prefill(
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
    _, heads, width = query.shape
    padded = next_power_of_2(width)
    narrow = padded <= 128 and query.dtype != torch.float32
    rows, keys = (128, 64) if narrow else (32, 32)
    starts = meta.query_starts[first : stop + 1]
    longest = max(after - before for before, after in pairwise(starts))
    grid = (-(-longest // rows), heads, stop - first)
    launch: Any = kernels.prefill_kernel[grid]
    launch(
        query, k_cache, v_cache, meta.block_tables[first:], meta.seq_lens[first:], meta.query_start_loc[first:], output,
        scale, meta.window or _NO_WINDOW, k_cache.shape[1], width,
        query.stride(0), query.stride(1), *_cache_strides(k_cache), meta.block_tables.stride(0),
        output.stride(0), output.stride(1),
        GROUP=heads // k_cache.shape[2], ROWS=rows, KEYS=keys, PADDED=padded, PRECISION=_precision(query.dtype),
        num_warps=8 if narrow else 4, num_stages=3 if narrow else 2,
    )  # fmt: skip
