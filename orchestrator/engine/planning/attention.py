"""The attention backends as a plan runs them: they allocate what the real ones do, and compute nothing."""

from __future__ import annotations

from typing import ClassVar

import torch

from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.parts import is_one_new_sequence, num_splits, prefills, whole
from orchestrator.engine.attention.reference import ReferenceAttention


class PlannedTriton(AttentionBackend):
    """`triton`, without the package of that name. Divides a step as that does, by the same functions."""

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
            _decode(query[:decodes], k_cache.shape[2])
        for first, stop, by_itself in prefills(meta, decodes):
            if by_itself:
                rows = slice(meta.query_starts[first], meta.query_starts[stop])
                output[rows] = whole(query[rows], key[rows], value[rows], scale)
        return output


def _decode(query: torch.Tensor, kv_heads: int) -> None:
    """Parts of each row's keys are summed up apart, in float32."""
    rows, heads, width = query.shape
    splits = num_splits(rows, kv_heads)
    if splits > 1:
        parts = torch.empty((rows, heads, splits, width), dtype=torch.float32, device=query.device)
        sums = torch.empty((rows, heads, splits, 2), dtype=torch.float32, device=query.device)
        del parts, sums


class PlannedVarlen(AttentionBackend):
    """`varlen`, whatever torch is installed."""

    name: ClassVar[str] = "varlen"
    dtypes: ClassVar[frozenset[str]] = frozenset({"float16", "bfloat16"})
    abilities: ClassVar[frozenset[str]] = frozenset({WINDOW})

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
        rows = query.contiguous()
        sums = torch.empty(rows.shape[:2], dtype=torch.float32, device=query.device)
        output = torch.empty_like(rows)
        del sums
        return output


BACKENDS: dict[str, type[AttentionBackend]] = {
    "triton": PlannedTriton,
    "reference": ReferenceAttention,
    "varlen": PlannedVarlen,
}
