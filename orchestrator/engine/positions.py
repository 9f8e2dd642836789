"""Positions on several axes (M-RoPE), by the model's own arithmetic, on the host, once a request."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.engine.inputs import RequestError
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
            return Axes((tuple(range(len(token_ids))),) * 3, 0)
        ids = torch.tensor([token_ids])
        types = torch.zeros_like(ids)
        for item in items:
            types[0, list(item.positions)] = TOKEN_TYPES[item.inputs.modality]
        try:
            positions, delta = self._index(input_ids=ids, mm_token_type_ids=types, **self._arguments(items))
        except (RuntimeError, ValueError, StopIteration, TypeError) as error:
            raise RequestError(f"the model cannot give positions to the items of the prompt ({error})") from error
        return Axes(tuple(tuple(axis) for axis in positions[:, 0].tolist()), int(delta))

    def _arguments(self, items: Sequence[PlacedItem]) -> dict[str, torch.Tensor]:
        """The items' tensors that the method asks for, such as `image_grid_thw`."""
        found: dict[str, list[torch.Tensor]] = {}
        for item in items:
            for name, tensor in item.inputs.tensors.items():
                if name in self._takes:
                    found.setdefault(name, []).append(tensor)
        return {name: torch.cat(tensors) for name, tensors in found.items()}
