"""The encoder budget against the values that the field's engines use."""

from __future__ import annotations

import pytest

from orchestrator.errors import ConfigError
from orchestrator.modality.budget import encoder_budget


@pytest.mark.parametrize(
    ("batched", "items", "budget"),
    [
        (8192, {"image": 16384}, 16384),
        (8192, {"image": 16384, "video": 98304}, 98304),
        (2048, {"audio": 375}, 2048),
        (8192, {}, 0),
    ],
)
def test_the_larger_of_a_step_and_the_largest_item(batched: int, items: dict[str, int], budget: int) -> None:
    found = encoder_budget(max_num_batched_tokens=batched, max_tokens_per_item=items)
    assert (found.compute_budget, found.cache_size) == (budget, budget)


def test_items_of_a_step() -> None:
    found = encoder_budget(max_num_batched_tokens=32768, max_tokens_per_item={"audio": 1500})
    assert (found.compute_budget, found.items_per_step) == (32768, {"audio": 21})


def test_a_smaller_cache_bounds_the_items_of_a_step() -> None:
    found = encoder_budget(max_num_batched_tokens=4096, max_tokens_per_item={"image": 500}, cache_size=1200)
    assert (found.compute_budget, found.cache_size, found.items_per_step) == (4096, 1200, {"image": 2})


@pytest.mark.parametrize("field", ["compute_budget", "cache_size"])
def test_a_budget_below_the_largest_item_is_refused_with_both_numbers(field: str) -> None:
    sizes = {"image": 6042, "audio": 10}
    with pytest.raises(ConfigError, match=rf"encoder\.{field}=4800.*one image can have 6042"):
        encoder_budget(max_num_batched_tokens=8192, max_tokens_per_item=sizes, **{field: 4800})
