"""Bytes are integers; GiB exist only where a person reads or types them."""

from __future__ import annotations

import re

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB
TiB = 1024 * GiB

_UNITS = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
NOT_A_SIZE = "not a size; write for example 4GiB, 512MiB or a whole number of bytes"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `4GiB`, `512 MiB`, `80GB` or a plain number of bytes.

    Raises:
        ValueError: not a size, or a fraction of a byte's unit.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    unit = (match.group(2).lower() or "b") if match else ""
    if match is None or unit not in _UNITS or (unit == "b" and "." in match.group(1)):
        raise ValueError(NOT_A_SIZE)
    return int(float(match.group(1)) * _UNITS[unit]) if "." in match.group(1) else int(match.group(1)) * _UNITS[unit]


def format_gib(size: int) -> str:
    """`size` bytes as GiB with two decimals, without the unit."""
    return f"{size / GiB:.2f}"


def format_size(size: int) -> str:
    """`size` bytes in the largest binary unit that leaves at least one whole: `13.0 MiB`."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.2f} {unit}"
