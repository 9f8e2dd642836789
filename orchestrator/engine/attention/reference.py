"""The reference backend: exact, on any device, one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from orchestrator.engine.attention.base import BOTH_WAYS, WINDOW, AttentionBackend, AttentionMetadata
from orchestrator.engine.kv_cache import blocks_for


class ReferenceAttention(AttentionBackend):
    """PyTorch's own attention. A sequence without context attends on its new keys; one with context on its blocks.

    Args:
        scores_at_once: query heads x rows x keys in one call on gathered keys; bounds the mask, and the scores where
            a kernel materialises them.
    """

    name: ClassVar[str] = "reference"
    abilities: ClassVar[frozenset[str]] = frozenset({WINDOW, BOTH_WAYS})

    def __init__(self, scores_at_once: int = 1 << 26) -> None:
        self._scores_at_once = scores_at_once

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
        output = torch.empty_like(query)
        for index, length in enumerate(meta.lengths):
            rows = slice(meta.query_starts[index], meta.query_starts[index + 1])
            fresh = rows.stop - rows.start
            runs = meta.both_ways[index] if meta.both_ways else ()
            if fresh == length and not runs and (meta.window is None or meta.window >= length):
                output[rows] = dense(query[rows], key[rows], value[rows], scale, causal=fresh > 1)
                continue
            # Keys that no row looks at any more are not read.
            first = 0 if meta.window is None else max(0, length - fresh - meta.window + 1)
            table = meta.block_tables[index, : blocks_for(length, k_cache.shape[1])]
            keys = _gather(k_cache, table, first, length).to(query.dtype)
            values = _gather(v_cache, table, first, length).to(query.dtype)
            step = max(1, self._scores_at_once // (query.shape[1] * length))
            for start in range(rows.start, rows.stop, step):
                piece = slice(start, min(start + step, rows.stop))
                # The last of the new tokens is at `length - 1`, so these rows are the positions up to `stop`.
                stop = length - (rows.stop - piece.stop)
                seen = max([stop, *(run[1] for run in runs if run[0] < stop)])
                mask = _mask(stop - (piece.stop - piece.start), stop, first, seen, meta.window, runs, query.device)
                near = slice(0, seen - first)
                output[piece] = dense(query[piece], keys[near], values[near], scale, mask=mask)
        return output


def _gather(cache: torch.Tensor, table: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Tokens `first` to `stop` (exclusive) of a block table: (stop - first, kv heads, head size)."""
    skipped = first // cache.shape[1]
    tokens = cache.index_select(0, table[skipped:]).flatten(0, 1)
    return tokens[first - skipped * cache.shape[1] : stop - skipped * cache.shape[1]]


def _mask(
    start: int,
    stop: int,
    first: int,
    seen: int,
    window: int | None,
    runs: Sequence[tuple[int, int]],
    device: torch.device,
) -> torch.Tensor | None:
    """(stop - start, seen - first), true where the token of a position `start` to `stop` may look at one of `first` to
    `seen`: back as far as the window goes, and inside a run both ways. None where all may."""
    rows, columns = stop - start, seen - first
    if rows == 1 and not runs and (window is None or columns <= window):
        return None
    mask = torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(start - first)
    for run in runs:
        mask[max(0, run[0] - start) : max(0, run[1] - start), max(0, run[0] - first) : max(0, run[1] - first)] = True
    return mask if window is None else mask.triu_(start - first - window + 1)


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's attention on keys and values as they lie; all (tokens, heads, head size)."""
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return output.squeeze(0).transpose(0, 1)
