"""The rule for tiles against the real processor."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from orchestrator_internvl.profiler import InternVLProfiler
from transformers import AutoProcessor

from tests.toy import composed


def profiler(processor: Any, *overrides: str) -> InternVLProfiler:
    return InternVLProfiler(processor, SimpleNamespace(), composed(*overrides).mm)


@pytest.fixture(scope="module")
def processor(tiny_folder: Path) -> Any:
    load: Any = AutoProcessor.from_pretrained
    return load(tiny_folder)


def sizes(count: int) -> list[tuple[int, int]]:
    """Seeded (width, height) pairs, and the ones where ties and extremes are."""
    rng = random.Random(0)
    drawn = [(rng.randint(8, 4000), rng.randint(8, 4000)) for _ in range(count)]
    return [*drawn, (1, 1), (448, 448), (300, 300), (2000, 2000), (4000, 100), (1792, 1344), (317, 316), (640, 320)]


@pytest.mark.parametrize("options", [{}, {"max_patches": 6}, {"min_patches": 3, "max_patches": 4}, {"max_patches": 1}])
def test_the_rule_is_the_processors_for_200_sizes(processor: Any, options: dict[str, int]) -> None:
    ours = profiler(processor, *(f"mm.processor_kwargs.{key}={value}" for key, value in options.items()))
    shapes = sizes(200)
    theirs = [processor.image_processor.get_number_of_image_patches(height, width, options) for width, height in shapes]
    assert [ours.tokens("image", shape) for shape in shapes] == [64 * tiles for tiles in theirs]


def test_the_processor_really_makes_that_many_tiles(processor: Any) -> None:
    ours = profiler(processor)
    for spec in (ours.costliest("image"), profiler(processor, "mm.image.max_size=[300,90]").costliest("image")):
        made = processor.image_processor(ours.build(spec), return_tensors="pt")["pixel_values"]
        assert len(made) * 64 == spec.tokens


def test_the_costliest_image_is_a_matter_of_shape(processor: Any) -> None:
    ours = profiler(processor)
    costliest = ours.costliest("image")
    assert costliest.tokens == 13 * 64
    assert ours.tokens("image", (2000, 2000)) == 10 * 64
    assert max(ours.tokens("image", shape) for shape in sizes(200)) <= 13 * 64


@pytest.mark.parametrize("most", [[512, 512], [100, 1000], [50, 50], [2000, 30], [7, 7], [1, 1]])
def test_no_image_within_a_limit_costs_more(processor: Any, most: list[int]) -> None:
    ours = profiler(processor, f"mm.image.max_size=[{most[0]},{most[1]}]")
    costliest = ours.costliest("image")
    assert costliest.shape[0] <= most[0] and costliest.shape[1] <= most[1]
    rng = random.Random(1)
    for _ in range(300):
        shape = (rng.randint(1, most[0]), rng.randint(1, most[1]))
        assert ours.tokens("image", shape) <= (costliest.tokens or 0), shape


def test_fewer_tiles_where_the_processor_is_told_so(processor: Any) -> None:
    assert profiler(processor, "mm.processor_kwargs.max_patches=4").costliest("image").tokens == 5 * 64
    assert profiler(processor, "mm.processor_kwargs.crop_to_patches=false").costliest("image").tokens == 64
