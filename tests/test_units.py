from __future__ import annotations

import pytest

from orchestrator.units import GiB, format_gib, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [(7, 7), ("7", 7), ("4GiB", 4 * GiB), ("4 gib", 4 * GiB), ("1.5GiB", 3 * GiB // 2), ("80GB", 80 * 10**9)],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "four", "4 apples", "-1", "1.5"])
def test_what_is_not_a_size_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 4GiB"):
        parse_size(text)


def test_large_numbers_of_bytes_stay_exact() -> None:
    assert parse_size("123456789012345678901") == 123456789012345678901


def test_sizes_as_people_read_them() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 3 * GiB, 5000 * GiB)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 GiB",
        "5000.00 GiB",
    ]
    assert format_gib(GiB // 2) == "0.50"
