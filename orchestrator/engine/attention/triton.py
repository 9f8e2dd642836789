"""The Triton backend: paged attention on the device's own lengths, which a graph can capture."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, ClassVar

import torch
import triton
from triton import next_power_of_2

from orchestrator.engine.attention import triton_kernels as kernels
from orchestrator.engine.attention.base import AttentionMetadata, AttentionShape
from orchestrator.engine.attention.parts import PROGRAMS, DividedAttention, num_splits, partial_sums
from orchestrator.engine.attention.tiles import Tiles, decode_tiles, prefill_tiles
from orchestrator.engine.kv_cache import PADDING_BLOCK

_NO_WINDOW = 1 << 30


class TritonAttention(DividedAttention):
    """Sequences with one new token split their keys over programs; those with more take blocks of rows.

    Args:
        prefill: tiles to take in place of those for the device.
        decode: as `prefill`.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})

    def __init__(self, prefill: Tiles | None = None, decode: Tiles | None = None) -> None:
        self._prefill_tiles, self._decode_tiles = prefill, decode

    def warm_up(self, shape: AttentionShape, torch_device: str) -> None:
        """See `AttentionBackend`. Triton keeps what it compiled on disk (`~/.triton/cache`, or `TRITON_CACHE_DIR`), so
        that a later process only loads it. A window is no kernel of its own."""
        dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
        cache = torch.zeros(1, shape.block_size, shape.kv_heads, shape.head_size, dtype=kv_dtype, device=torch_device)
        for spans in _variants(shape.kv_heads):
            meta = AttentionMetadata.build(spans, [[PADDING_BLOCK]] * len(spans), shape.block_size, torch_device)
            tokens = meta.query_starts[-1]
            query = torch.zeros(tokens, shape.heads, shape.head_size, dtype=dtype, device=torch_device)
            new = torch.zeros(tokens, shape.kv_heads, shape.head_size, dtype=dtype, device=torch_device)
            self.attend(query, new, new, cache, cache, meta, shape.head_size**-0.5)

    def _decode(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        # Unsplit they go into the output at once.
        rows, heads, width = query.shape
        kv_heads = k_cache.shape[2]
        splits, padded, group = num_splits(rows, kv_heads), next_power_of_2(width), heads // kv_heads
        tiles = self._decode_tiles or decode_tiles(group, padded)
        parts, sums = output.unsqueeze(2), output
        if splits > 1:
            parts, sums = partial_sums(query, splits)
        launch: Any = kernels.decode_kernel[(rows, kv_heads, splits)]
        launch(
            query, k_cache, v_cache, meta.block_tables, meta.seq_lens, parts, sums, scale, meta.window or _NO_WINDOW,
            query.stride(0), query.stride(1), *_cache_strides(k_cache), meta.block_tables.stride(0),
            *parts.stride()[:3],
            BLOCK=k_cache.shape[1], WIDTH=width, GROUP=group, ROWS=tiles.rows, KEYS=tiles.keys, PADDED=padded,
            SPLITS=splits, PRECISION=_precision(query.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if splits == 1:
            return
        combine: Any = kernels.combine_kernel[(rows, heads)]
        combine(
            parts, sums, output, output.stride(0), output.stride(1), parts.stride(0), parts.stride(1),
            WIDTH=width, SPLITS=splits, PADDED=padded,
        )  # fmt: skip

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
        _, heads, width = query.shape
        padded = next_power_of_2(width)
        itemsize = max(query.element_size(), k_cache.element_size())
        tiles = self._prefill_tiles or prefill_tiles(padded, itemsize, _capability(query.device))
        starts = meta.query_starts[first : stop + 1]
        longest = max(after - before for before, after in pairwise(starts))
        launch: Any = kernels.prefill_kernel[(-(-longest // tiles.rows), heads, stop - first)]
        launch(
            query, k_cache, v_cache, meta.block_tables[first:], meta.seq_lens[first:], meta.query_start_loc[first:],
            output, scale, meta.window or _NO_WINDOW,
            query.stride(0), query.stride(1), *_cache_strides(k_cache), meta.block_tables.stride(0),
            output.stride(0), output.stride(1),
            BLOCK=k_cache.shape[1], WIDTH=width, GROUP=heads // k_cache.shape[2], ROWS=tiles.rows, KEYS=tiles.keys,
            PADDED=padded, PRECISION=_precision(query.dtype), num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def _variants(kv_heads: int) -> Iterator[list[tuple[int, int]]]:
    """Steps on one block that launch each kernel there is: decodes with each number of splits, and a prefill."""
    seen: set[int] = set()
    for num_seqs in (1 << power for power in range(PROGRAMS.bit_length() + 1)):
        splits = num_splits(num_seqs, kv_heads)
        if splits not in seen:
            seen.add(splits)
            yield [(0, 1)] * num_seqs
    yield [(0, 2)]


def _capability(device: torch.device) -> int:
    """Such as 90; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    return int(triton.runtime.driver.active.get_current_target().arch)


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _cache_strides(k_cache: torch.Tensor) -> tuple[int, int, int]:
    return k_cache.stride(0), k_cache.stride(1), k_cache.stride(2)
