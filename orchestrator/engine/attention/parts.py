"""How the Triton backend divides a step over kernels; without Triton, so that a plan divides it in the same way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from orchestrator.engine.attention.base import AttentionMetadata
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
