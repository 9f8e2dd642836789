"""Positions on several axes (M-RoPE), by the model's own arithmetic, on the host, once a request."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from orchestrator.engine.media import RequestError
from orchestrator.engine.step import Axes, PlacedItem

TOKEN_TYPES = {"image": 1, "video": 2, "audio": 3}
"""What transformers' processors call a token of each modality in `mm_token_type_ids`; 0 is text."""


class RopeIndex:
    """The model's `get_rope_index` for one prompt at a time.

    Args:
        model: a transformers model whose `base_model` has that method.
    """

    def __init__(self, model: Any) -> None:
        self._index = model.base_model.get_rope_index
        self._takes = inspect.signature(self._index).parameters

    def axes(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> Axes:
        """Positions of a prompt's tokens.

        Raises:
            RequestError: the model cannot place the items, for example because nothing stands between two of them.
        """
        if not items:
            return Axes((tuple(range(len(token_ids))),) * 3)
        ids = torch.tensor([token_ids])
        types = torch.zeros_like(ids)
        for item in items:
            types[0, list(item.positions)] = TOKEN_TYPES[item.inputs.modality]
        try:
            positions, _ = self._index(input_ids=ids, **self._arguments(types, items))
        except (RuntimeError, ValueError, StopIteration, TypeError) as error:
            raise RequestError(f"the model cannot give positions to the items of the prompt ({error})") from error
        return Axes(tuple(tuple(axis) for axis in positions[:, 0].tolist()))

    def _arguments(self, types: torch.Tensor, items: Sequence[PlacedItem]) -> dict[str, torch.Tensor]:
        """What the method asks for: the items' tensors, such as `image_grid_thw`, and what each token is."""
        found: dict[str, list[torch.Tensor]] = {}
        for item in items:
            for name, tensor in _position_inputs(item.inputs.tensors):
                if name in self._takes:
                    found.setdefault(name, []).append(tensor)
        if "mm_token_type_ids" in self._takes:
            found["mm_token_type_ids"] = [types]
        elif "attention_mask" in self._takes:
            found["attention_mask"] = [torch.ones_like(types)]
        return {name: torch.cat(tensors) for name, tensors in found.items()}


def _position_inputs(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """An item's tensors by the names that `get_rope_index` methods have for them."""
    for name, tensor in tensors.items():
        if name == "feature_attention_mask":
            yield "audio_seqlens", tensor.sum(-1)
        yield ("second_per_grids" if name == "video_second_per_grid" else name), tensor
