"""How large a piece of attention one Triton program takes, by what the device has of shared memory."""

from __future__ import annotations

from dataclasses import dataclass

_ROOMIEST = frozenset({90, 100, 103})
"""Compute capabilities whose multiprocessors give a program 227 KiB of shared memory."""
_ROOMY = _ROOMIEST | {80, 87}
"""163 KiB or more; others from 8.0 on give 99, and older ones 64."""


@dataclass(frozen=True)
class Tiles:
    """Query rows and keys that a program works on at once, its warps, and how many loads of keys it has under way."""

    rows: int
    keys: int
    warps: int
    stages: int


def prefill_tiles(width: int, itemsize: int, capability: int) -> Tiles:
    """For heads padded to `width` elements of `itemsize` bytes, on a device of a capability such as 90, or 0 for none.

    As compiled for capability 8.9, 128 rows and 64 keys of 128 elements in 16 bits take 64 KiB and a little; 32 rows
    and 32 keys of 256 elements in 32 bits 100 KiB. Those for 9.0 are the fastest of `python -m tests.gpu.run tune`.
    """
    if itemsize > 2 or width > 128:
        return Tiles(32, 32 if capability in _ROOMY else 16, 4, 2)
    if capability in _ROOMIEST:
        return Tiles(128, 128, 8, 3)
    return Tiles(64, 32, 4, 2) if 0 < capability < 80 else Tiles(128, 64, 8, 3)


def decode_tiles(heads: int, width: int) -> Tiles:
    """For so many query heads of one kv head."""
    rows = max(16, 1 << (heads - 1).bit_length())
    return Tiles(rows, 64 if width <= 128 else 32, 4, 3)
