"""How our attention enters transformers' model code: as one more named implementation, and a cache object.

A model calls `cache.update(..., kwargs=kwargs)` in each layer and then its attention function with the same `kwargs`.
The cache leaves there which backend to call and with what, so the registered function knows nothing by itself and any
number of engines can share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface

from orchestrator.engine.attention.base import WINDOW, AttentionBackend, AttentionMetadata
from orchestrator.engine.kv_cache import KVCache

IMPLEMENTATION = "orchestrator_paged"
_CALL = "paged_call"


@dataclass(frozen=True)
class _Call:
    """What one layer's attention needs beside its query, key and value."""

    backend: AttentionBackend
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata


class StepCache:
    """What transformers takes for its cache, for one step: writes new keys and values to the paged cache."""

    is_compileable = True

    def __init__(self, kv_cache: KVCache, backend: AttentionBackend, meta: AttentionMetadata) -> None:
        self._kv_cache, self._backend, self._meta = kv_cache, backend, meta
        self._rows = kv_cache.rows(meta.slot_mapping)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing, as far as a model may know: positions always come with the step."""
        return 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv heads, T, head size) keys and values of a layer and return them as they are.

        Raises:
            TypeError: the model keeps its attention's arguments to itself, so the step cannot reach our attention.
        """
        if kwargs is None:
            raise TypeError("this model's attention does not hand its arguments to the cache; it cannot be paged")
        self._kv_cache.write(layer_idx, self._rows, _tokens_first(key), _tokens_first(value))
        kwargs[_CALL] = _Call(self._backend, *self._kv_cache.layer(layer_idx), self._meta)
        return key, value


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    paged_call: _Call | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: heads first in, tokens first out, as it expects.

    Raises:
        TypeError: the layer wants attention of a kind that the paged backends do not have, or came without a cache.
    """
    if paged_call is None:
        raise TypeError(f"{type(module).__name__} was called without the paged cache")
    if softcap is not None or s_aux is not None:
        raise TypeError(f"{type(module).__name__} wants capped scores or sinks: the paged attention has none")
    meta = paged_call.meta
    if sliding_window is not None and sliding_window < meta.max_seq_len:
        if WINDOW not in paged_call.backend.abilities:
            raise TypeError(f"{type(module).__name__} wants a window: {paged_call.backend.name} has none")
        meta = replace(meta, window=sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = paged_call.backend.attend(
        _tokens_first(query),
        _tokens_first(key),
        _tokens_first(value),
        paged_call.k_cache,
        paged_call.v_cache,
        meta,
        scale,
    )
    return output.unsqueeze(0), None


def register() -> None:
    """Make `IMPLEMENTATION` known to transformers. May be called again."""
    AttentionInterface.register(IMPLEMENTATION, attend)


def _tokens_first(tensor: torch.Tensor) -> torch.Tensor:
    """(1, heads, T, head size) -> (T, heads, head size)"""
    return tensor.squeeze(0).transpose(0, 1)
