"""The reference backend: exact, on any device, one sequence after the other."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from orchestrator.engine.attention.base import AttentionBackend, AttentionMetadata
from orchestrator.engine.kv_cache import blocks_for


class ReferenceAttention(AttentionBackend):
    """PyTorch's own attention. A sequence without context attends on its new keys; one with context on its blocks.

    Args:
        scores_at_once: query heads x rows x keys in one call on gathered keys; bounds the mask, and the scores where
            a kernel materialises them.
    """

    name: ClassVar[str] = "reference"

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
            if fresh == length:
                output[rows] = _attend(query[rows], key[rows], value[rows], scale, causal=fresh > 1)
                continue
            table = meta.block_tables[index, : blocks_for(length, k_cache.shape[1])]
            keys = _gather(k_cache, table, length).to(query.dtype)
            values = _gather(v_cache, table, length).to(query.dtype)
            step = max(1, self._scores_at_once // (query.shape[1] * length))
            for start in range(rows.start, rows.stop, step):
                piece = slice(start, min(start + step, rows.stop))
                # Lower-right causal: the last of the new tokens sees all `length`, so these rows see up to `seen`.
                seen = length - (rows.stop - piece.stop)
                mask = _lower_right(piece.stop - piece.start, seen, query.device)
                output[piece] = _attend(query[piece], keys[:seen], values[:seen], scale, mask=mask)
        return output


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` tokens of a block table: (length, kv heads, head size)."""
    return cache.index_select(0, table).flatten(0, 1)[:length]


def _lower_right(rows: int, columns: int, device: torch.device) -> torch.Tensor | None:
    """(rows, columns), true where a row may look: the last row looks everywhere. None where all may."""
    if rows == 1:
        return None
    return torch.ones(rows, columns, dtype=torch.bool, device=device).tril_(columns - rows)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    query, key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return output.squeeze(0).transpose(0, 1)
