"""The step that the profile ran, remembered by shapes, so that it can run again when the dummy data are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from orchestrator.cache import Entry
from orchestrator.engine.remembering import Around
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

    @classmethod
    def read(cls, modality: str, said: dict[str, Any], tensors: dict[str, torch.Tensor], place: str) -> _Outline:
        rows, shapes = int(said["rows"]), {name: tuple(shape) for name, shape in said["shapes"].items()}
        integers = {
            name.removeprefix(place): tensor.clone() for name, tensor in tensors.items() if name.startswith(place)
        }
        return cls(MediaInputs(modality, [], [True] * rows, integers, f"dummy {modality}"), shapes)

    @property
    def integers(self) -> dict[str, torch.Tensor]:
        return self.item.tensors

    def build(self, torch_device: str, dtype: torch.dtype) -> MediaInputs:
        made = {name: torch.zeros(shape, device=torch_device, dtype=dtype) for name, shape in self.shapes.items()}
        return replace(self.item, tensors={**self.item.tensors, **made})


@dataclass
class WorstStep:
    """What was run, part by part; the last run of a part counts."""

    _items: list[tuple[dict[str, _Outline], dict[str, int]]] = field(default_factory=list)
    _tokens: tuple[int, int] | None = None
    _rows: int = 0
    variant: int | None = None
    """Of the ways to run the language model's step, the one that took most; None where that is not known."""

    def encoded(self, batch: DummyBatch, items: Mapping[str, int]) -> None:
        """So many items of each modality were encoded in one step."""
        outlines = {modality: _Outline.of(batch.items[modality]) for modality in items}
        self._items = [known for known in self._items if known[1].keys() != items.keys()]
        self._items.append((outlines, dict(items)))

    def computed(self, num_tokens: int, context: int, variant: int) -> None:
        self._tokens, self.variant = (num_tokens, context), variant

    def drew(self, num_rows: int) -> None:
        self._rows = num_rows

    def repeat(
        self,
        encode: Callable[[DummyBatch, dict[str, int]], None],
        compute: Callable[[int, int], None],
        draw: Callable[[int], None],
        torch_device: str,
        dtype: torch.dtype,
        around: Around,
    ) -> None:
        """Run the parts again, one after the other as in serving, on inputs that are made on the device.

        Args:
            around: see `RemembersSteps.repeat_parts`.
        """
        for outlines, items in list(self._items):
            with around(f"encoder.{'mixed' if len(items) > 1 else next(iter(items))}"):
                made = {modality: outline.build(torch_device, dtype) for modality, outline in outlines.items()}
                encode(DummyBatch(made), items)
        if self._tokens is not None:
            with around("language_model"):
                compute(*self._tokens)
        if self._rows:
            with around("logits"):
                draw(self._rows)

    def entry(self) -> Entry:
        """As `of` reads it: what is computed is decided by shapes, sizes and grids, not by pixels or tokens."""
        tensors: dict[str, torch.Tensor] = {}
        steps: list[dict[str, Any]] = []
        for outlines, items in self._items:
            said = {}
            for modality, outline in outlines.items():
                place = f"{len(steps)}.{modality}."
                tensors |= {place + name: tensor for name, tensor in outline.integers.items()}
                said[modality] = {"rows": outline.item.num_embeds, "shapes": outline.shapes}
            steps.append({"items": items, "outlines": said})
        return Entry(tensors, {"encoder": steps, "tokens": self._tokens, "rows": self._rows, "variant": self.variant})

    @classmethod
    def of(cls, entry: Entry) -> WorstStep:
        """
        Raises:
            ValueError: not an entry of a step.
        """
        step = cls()
        try:
            for number, said in enumerate(entry.meta["encoder"]):
                outlines = {
                    modality: _Outline.read(modality, each, entry.tensors, f"{number}.{modality}.")
                    for modality, each in said["outlines"].items()
                }
                items = {modality: int(count) for modality, count in said["items"].items()}
                if items.keys() != outlines.keys():
                    raise ValueError("items without a shape")
                step._items.append((outlines, items))
            tokens = entry.meta["tokens"]
            step._tokens = None if tokens is None else (int(tokens[0]), int(tokens[1]))
            step._rows = int(entry.meta["rows"])
            variant = entry.meta["variant"]
            step.variant = None if variant is None else int(variant)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        return step
