"""What one call of an encoder takes: as much as was measured, whether of few large items or of many small ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from orchestrator.engine.encoder import Encoder
from orchestrator.engine.encoder_cache import EncoderCache
from orchestrator.modality.base import MediaInputs


class Pictures:
    """An encoder of pictures, two rows of output each: their mean and their maximum."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.calls: list[int] = []

    def get_image_features(self, pixel_values: torch.Tensor, return_dict: bool = True) -> Any:
        self.calls.append(len(pixel_values))
        flat = pixel_values.flatten(1)
        rows = torch.stack([flat.mean(1), flat.amax(1)], 1).unsqueeze(-1)
        return SimpleNamespace(pooler_output=rows)


class Grids(Pictures):
    """One that wants more than pixels."""

    def get_image_features(  # type: ignore[override]
        self, pixel_values: torch.Tensor, sizes: torch.Tensor, return_dict: bool = True
    ) -> Any:
        return super().get_image_features(pixel_values)


def item(name: str, pictures: int, height: int = 4) -> MediaInputs:
    torch.manual_seed(sum(name.encode()))
    tensors = {"pixel_values": torch.randn(pictures, 3, height, 4), "sizes": torch.ones(pictures, 2)}
    return MediaInputs("image", [0] * 2 * pictures, [True] * 2 * pictures, tensors, name)


def calls(model: Pictures, sizes: list[int], micro_batch: int = 1, pieces: dict[str, int] | None = None) -> list[int]:
    """Pictures of each call, when items of so many are encoded after one of 6."""
    encoder, cache = Encoder(model, "cpu", micro_batch, 0), EncoderCache(100, 1, torch.float32, "cpu")
    encoder.set_micro_batch({"image": micro_batch}, pieces or {})
    items = [item("largest", 6), *(item(str(at), size) for at, size in enumerate(sizes))]
    for each in items:
        cache.index.add(each.content_hash, each.num_embeds)
    encoder.encode(items[:1], cache)
    before = len(model.calls)
    encoder.encode(items[1:], cache)
    for each in items:
        expected = Pictures().get_image_features(each.tensors["pixel_values"]).pooler_output.flatten(0, 1)
        torch.testing.assert_close(cache.slab[list(cache.index.rows(each.content_hash))], expected)
    return model.calls[before:]


@pytest.mark.parametrize(
    ("sizes", "micro_batch", "expected"),
    [
        ([1] * 6, 1, [6]),
        ([1] * 7, 1, [6, 1]),
        ([6, 6], 1, [6, 6]),
        ([2, 3, 2, 1], 1, [5, 3]),
        ([6, 6, 6], 2, [12, 6]),
        ([1] * 13, 2, [12, 1]),
    ],
)
def test_small_items_share_a_call_up_to_the_size_of_the_largest(
    sizes: list[int], micro_batch: int, expected: list[int]
) -> None:
    assert calls(Pictures(), sizes, micro_batch) == expected


def test_where_items_are_cut_a_piece_is_the_most() -> None:
    assert calls(Pictures(), [1, 1, 1, 6], pieces={"image": 4}) == [2, 1, 2, 2, 2]


def test_items_that_are_more_than_pictures_are_counted_one_by_one() -> None:
    assert calls(Grids(), [1, 1, 1], 2) == [2, 1]
