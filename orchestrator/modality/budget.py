"""How many encoder tokens a step may compute and the engine keeps. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.errors import ConfigError


@dataclass(frozen=True)
class EncoderBudget:
    """Encoder tokens: `compute_budget` in one step, `cache_size` kept; `items_per_step` by modality."""

    compute_budget: int
    cache_size: int
    items_per_step: dict[str, int]


def encoder_budget(
    *,
    max_num_batched_tokens: int,
    max_tokens_per_item: Mapping[str, int],
    compute_budget: int | None = None,
    cache_size: int | None = None,
) -> EncoderBudget:
    """The budget for items of at most `max_tokens_per_item` tokens, by modality.

    By default both numbers are the larger of `max_num_batched_tokens` and the largest item, as is usual in the field:
    a step never encodes more than it can consume, and any one item fits.

    Raises:
        ConfigError: a configured number is below the largest item that the limits allow.
    """
    if not max_tokens_per_item:
        return EncoderBudget(0, 0, {})
    largest = max(max_tokens_per_item.values())
    default = max(max_num_batched_tokens, largest)
    compute = default if compute_budget is None else compute_budget
    cache = default if cache_size is None else cache_size
    for name, value in (("compute_budget", compute), ("cache_size", cache)):
        if value < largest:
            which = max(max_tokens_per_item, key=lambda modality: max_tokens_per_item[modality])
            raise ConfigError.of(
                f"encoder.{name}",
                f"one {which} can have {largest} encoder tokens; give at least {largest}, or lower mm.{which}",
                value,
            )
    items = {modality: min(compute, cache) // tokens for modality, tokens in max_tokens_per_item.items() if tokens}
    return EncoderBudget(compute, cache, items)
