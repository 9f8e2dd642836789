"""The Triton backend: paged attention on the device's own lengths, which a graph can capture."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from triton import next_power_of_2

from orchestrator.engine.attention import triton_kernels as kernels
from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata

_NO_WINDOW = 1 << 30
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
    def refusal(cls, device: str, dtype: str, head_size: int) -> str | None:
        if not 16 <= head_size <= 256:
            return f"it takes heads of size 16 to 256, not {head_size}"
        return super().refusal(device, dtype, head_size)

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
        if decodes < meta.num_seqs:
            _prefill(query, k_cache, v_cache, meta, decodes, scale, output)
        return output


def num_splits(num_seqs: int, num_kv_heads: int) -> int:
    """Parts of a sequence's keys, a power of two up to 32: as many as fill the device, and one where heads and
    sequences already do. A function of the shape alone, so that a captured call and a new one agree."""
    wanted = -(-_PROGRAMS // (num_seqs * num_kv_heads))
    return int(min(32, next_power_of_2(wanted)))


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
    scale: float,
    output: torch.Tensor,
) -> None:
    """The sequences from `first` on, with any number of new tokens."""
    _, heads, width = query.shape
    padded = next_power_of_2(width)
    narrow = padded <= 128 and query.dtype != torch.float32
    rows, keys = (128, 64) if narrow else (32, 32)
    grid = (-(-meta.max_query_len // rows), heads, meta.num_seqs - first)
    launch: Any = kernels.prefill_kernel[grid]
    launch(
        query, k_cache, v_cache, meta.block_tables[first:], meta.seq_lens[first:], meta.query_start_loc[first:], output,
        scale, meta.window or _NO_WINDOW, k_cache.shape[1], width,
        query.stride(0), query.stride(1), *_cache_strides(k_cache), meta.block_tables.stride(0),
        output.stride(0), output.stride(1),
        GROUP=heads // k_cache.shape[2], ROWS=rows, KEYS=keys, PADDED=padded, PRECISION=_precision(query.dtype),
        num_warps=8 if narrow else 4, num_stages=3 if narrow else 2,
    )  # fmt: skip
