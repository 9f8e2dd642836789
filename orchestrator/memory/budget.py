"""The arithmetic of the budget. Pure: bytes in, bytes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import BudgetError
from orchestrator.units import format_gib, format_size

LIMITS = {"util": "gpu.util", "free": "free memory", "kv_bytes": "kv.bytes"}
"""What limits the KV cache, as a person reads it."""


@dataclass(frozen=True)
class KVBudget:
    """What the KV cache may take, of what was asked for, and which limit decided."""

    requested_bytes: int
    available_bytes: int
    limited_by: Literal["util", "free", "kv_bytes"]


def kv_budget(
    *,
    total_bytes: int,
    util: float,
    weights: int,
    non_torch: int,
    peak_activation: int,
    cudagraph: int = 0,
    encoder_cache: int = 0,
    other_processes: int = 0,
    kv_bytes: int | None = None,
) -> KVBudget:
    """Bytes left for the KV cache: `util * total` less what is charged, and never more than is free beside others.

    With `kv_bytes` the fraction is not consulted: that size is used if the device has room for it.

    Raises:
        BudgetError: nothing is left, or `kv_bytes` does not fit.
        ValueError: a negative size, or a util outside (0, 1].
    """
    charged_by = dict(
        weights=weights,
        non_torch=non_torch,
        peak_activation=peak_activation,
        cudagraph=cudagraph,
        encoder_cache=encoder_cache,
    )
    given = dict(total_bytes=total_bytes, other_processes=other_processes, kv_bytes=kv_bytes or 0, **charged_by)
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"{name} is {value}: a size is never negative")
    if not 0 < util <= 1:
        raise ValueError(f"util is {util}: it must be above 0 and at most 1")
    charged = sum(charged_by.values())
    requested = requested_bytes(total_bytes, util)
    free = max(0, total_bytes - other_processes)
    if kv_bytes is not None:
        if charged + kv_bytes > free:
            suggestions = {"kv.bytes": str(free - charged)} if free > charged else {}
            what = f"kv.bytes={kv_bytes}: with what is charged {format_size(charged + kv_bytes)} are wanted"
            raise BudgetError(
                f"{what}, and {format_size(free)} are free",
                wanted_bytes=charged + kv_bytes,
                free_bytes=free,
                suggestions=suggestions,
            )
        return KVBudget(requested, kv_bytes, "kv_bytes")
    available = min(requested, free) - charged
    if available <= 0:
        there = f"gpu.util={util:g} allows {format_size(requested)}"
        if free < requested:
            there += f", of which {format_size(free)} are free"
        raise BudgetError(
            f"{there}, and {format_size(charged)} are charged before the KV cache",
            wanted_bytes=charged,
            free_bytes=min(requested, free),
            suggestions=suggest_util(total_bytes, charged, free),
        )
    return KVBudget(requested, available, "free" if free < requested else "util")


def requested_bytes(total_bytes: int, util: float) -> int:
    """The ceiling on what a start may hold. Rounded to a whole byte, so that a product of decimal fractions does not
    lose one to the binary representation of `util`."""
    return round(total_bytes * util)


def refuse_if_not_free(
    *, total_bytes: int, util: float, free_bytes: int, promised: Mapping[str, int] | None = None
) -> None:
    """Refuse a start that asks for more than is free before it begins.

    Args:
        free_bytes: beside what was promised to others.
        promised: who was promised how many bytes that they have not taken yet.

    Raises:
        BudgetError: names what is wanted, what is free and the largest util (two decimals) that fits.
    """
    wanted = requested_bytes(total_bytes, util)
    if wanted <= free_bytes:
        return
    works = next((step for step in range(99, 0, -1) if requested_bytes(total_bytes, step / 100) <= free_bytes), None)
    raise BudgetError(
        f"gpu.util={util:g} asks for {format_gib(wanted)} GiB of {format_gib(total_bytes)}, "
        f"but only {format_gib(free_bytes)} GiB are free{_beside(promised or {})}",
        wanted_bytes=wanted,
        free_bytes=free_bytes,
        suggestions={"gpu.util": f"{works / 100:.2f}"} if works is not None else {},
        certain=False,
    )


def _beside(promised: Mapping[str, int]) -> str:
    named = ", ".join(f"{format_size(size)} to {holder}" for holder, size in promised.items())
    return f" beside what was promised: {named}" if named else ""


def suggest_util(total_bytes: int, charged: int, free_bytes: int) -> dict[str, str]:
    """The smallest util, in steps of 0.01, that leaves something beside `charged`, if the device has the room."""
    step = next((step for step in range(1, 101) if requested_bytes(total_bytes, step / 100) > charged), None)
    if step is None or requested_bytes(total_bytes, step / 100) > free_bytes:
        return {}
    return {"gpu.util": f"{step / 100:.2f}"}


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes that one token's keys and values take over all layers: 2 x layers x heads x head size x element size."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype_bytes


def max_model_len_that_fits(*, available_bytes: int, bytes_per_token: int, block_size: int) -> int:
    """The longest sequence, in tokens, that whole blocks of `available_bytes` can hold."""
    return max(0, available_bytes) // (bytes_per_token * block_size) * block_size


def blocks_needed(*, num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Blocks for `num_seqs` sequences of `max_model_len` tokens; no block is shared, so each rounds up."""
    return num_seqs * -(-max_model_len // block_size)


def cudagraph_bytes(readings: Sequence[int]) -> int:
    """What captures took, from readings of this process's bytes before the first and after each.

    A fall is another thing's doing (a cache emptied, a neighbour in a device-wide reading) and charges nothing.
    """
    return max(0, readings[-1] - readings[0]) if readings else 0
