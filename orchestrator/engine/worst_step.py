"""The step that the profile ran, remembered by shapes, so that it can run again when the dummy data are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from orchestrator.modality.base import DummyBatch, MediaInputs


@dataclass(frozen=True)
class _Outline:
    """A media item without its pixels or samples. Integers stay: grids and sizes decide what is computed."""

    item: MediaInputs
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, item: MediaInputs) -> _Outline:
        floats = {name for name, tensor in item.tensors.items() if tensor.is_floating_point()}
        shapes = {name: tuple(item.tensors[name].shape) for name in floats}
        kept = {name: tensor.clone() for name, tensor in item.tensors.items() if name not in floats}
        return cls(replace(item, tensors=kept), shapes)

    def build(self, torch_device: str, dtype: torch.dtype) -> MediaInputs:
        made = {name: torch.zeros(shape, device=torch_device, dtype=dtype) for name, shape in self.shapes.items()}
        return replace(self.item, tensors={**self.item.tensors, **made})


@dataclass
class WorstStep:
    """What was run, part by part; the last run of a part counts."""

    _items: list[tuple[dict[str, _Outline], dict[str, int]]] = field(default_factory=list)
    _tokens: tuple[int, int] | None = None
    _rows: int = 0

    def encoded(self, batch: DummyBatch, items: Mapping[str, int]) -> None:
        """So many items of each modality were encoded in one step."""
        outlines = {modality: _Outline.of(batch.items[modality]) for modality in items}
        self._items = [known for known in self._items if known[1].keys() != items.keys()]
        self._items.append((outlines, dict(items)))

    def computed(self, num_tokens: int, context: int) -> None:
        self._tokens = (num_tokens, context)

    def drew(self, num_rows: int) -> None:
        self._rows = num_rows

    def repeat(
        self,
        encode: Callable[[DummyBatch, dict[str, int]], None],
        compute: Callable[[int, int], None],
        draw: Callable[[int], None],
        torch_device: str,
        dtype: torch.dtype,
    ) -> None:
        """Run the parts again, one after the other as in serving, on inputs that are made on the device."""
        for outlines, items in list(self._items):
            made = {modality: outline.build(torch_device, dtype) for modality, outline in outlines.items()}
            encode(DummyBatch(made), items)
        if self._tokens is not None:
            compute(*self._tokens)
        if self._rows:
            draw(self._rows)
