"""The attention backends as a plan runs them: they allocate what the real ones do, and compute nothing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from orchestrator.engine.attention.base import AttentionBackend, AttentionMetadata
from orchestrator.engine.attention.parts import DividedAttention, num_splits, partial_sums
from orchestrator.engine.attention.reference import ReferenceAttention
from orchestrator.engine.attention.varlen import VarlenAttention


class PlannedTriton(DividedAttention):
    """`triton`, without the package of that name."""

    def _decode(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        scale: float,
        output: torch.Tensor,
    ) -> None:
        splits = num_splits(query.shape[0], k_cache.shape[2])
        if splits > 1:
            partial_sums(query, splits)

    def _prefill(self, *_: Any) -> None:
        """Its kernel takes nothing beside the output."""


class PlannedVarlen(VarlenAttention):
    """`varlen`, whatever torch is installed."""

    devices: ClassVar[frozenset[str]] = frozenset()
    needs_torch: ClassVar[tuple[int, int]] = (0, 0)

    def __init__(self) -> None:
        """Needs nothing of torch's."""

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
