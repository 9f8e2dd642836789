"""PyTorch's own paged attention over sequences of any lengths, by name only: `engine.attention=varlen`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata

PAGE = 256
"""FlashAttention 2 takes blocks of this many tokens, or a multiple."""


class VarlenAttention(AttentionBackend):
    """Torch's own `varlen_attn` on the cache's blocks; by name only, because no committed record of a GPU covers it.

    Decodes and prefills go in one call. `auto` does not choose it, and it counts as not safe in graphs.

    Args:
        function: stands for `varlen_attn`.

    Attributes:
        needs_torch: the first release whose `varlen_attn` takes a block table.
    """

    name: ClassVar[str] = "varlen"
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float16", "bfloat16"})
    abilities: ClassVar[frozenset[str]] = frozenset({WINDOW})
    needs_torch: ClassVar[tuple[int, int]] = (2, 13)

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self._function = function or _varlen_attn()

    @classmethod
    def refusal(cls, device: str, dtype: str, head_size: int, block_size: int | None = None) -> str | None:
        # What no setting of the cache would change comes first.
        refusal = super().refusal(device, dtype, head_size, block_size)
        if refusal:
            return refusal
        if version_of(torch.__version__) < cls.needs_torch:
            return f"it needs torch {'.'.join(map(str, cls.needs_torch))} or newer, and this is {torch.__version__}"
        if head_size % 8 or not 8 <= head_size <= 256:
            return f"it takes heads of a size that 8 divides, up to 256, not {head_size}"
        if block_size is not None and block_size % PAGE:
            return f"it takes blocks of {PAGE} tokens or a multiple (kv.block_size={PAGE}), not {block_size}"
        return None

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
        # A window of 1 is the token alone; here it counts the tokens before.
        back = -1 if meta.window is None else meta.window - 1
        output: torch.Tensor = self._function(
            query.contiguous(),
            k_cache,
            v_cache,
            meta.query_start_loc,
            None,
            meta.max_query_len,
            meta.max_seq_len,
            scale=scale,
            window_size=(back, 0),
            enable_gqa=query.shape[1] != k_cache.shape[2],
            seqused_k=meta.seq_lens,
            block_table=meta.block_tables,
        )
        return output


def version_of(spelled: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cu130"."""
    major, minor = spelled.split(".")[:2]
    return int(major), int(minor)


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    found: Callable[..., Any] = varlen_attn
    return found
