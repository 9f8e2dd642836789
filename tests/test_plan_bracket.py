"""The search for the largest number that fits: right for any hints, and quick where they are nearly right."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.plan.bracket import Bracket


def search(fits: Callable[[int], bool], hint: Callable[[int], int], most: int | None) -> tuple[int, int]:
    """The number found, and the tries that it took."""
    bracket, guess, tries = Bracket(0, None if most is None else most + 1), most or 1, 0
    while bracket.open:
        bracket.tried(guess, fits(guess), hint(guess))
        guess, tries = bracket.guess(), tries + 1
    return bracket.low, tries


@pytest.mark.parametrize("most", [1, 7, 1000, 32768, None])
@pytest.mark.parametrize("slope", [0.0, -0.001, -0.3, -0.9])
@pytest.mark.parametrize("start", [0.0, 3.0, 900.5, 20000.0])
def test_hints_on_a_line_are_met_in_a_few_tries(most: int | None, slope: float, start: float) -> None:
    def hint(number: int) -> int:
        return int(start + slope * number)

    expected = max((number for number in range(int(start) + 2) if hint(number) >= number), default=0)
    found, tries = search(lambda number: hint(number) >= number, hint, most)
    assert found == (expected if most is None else min(expected, most))
    assert tries <= 7


@pytest.mark.parametrize("end", [0, 1, 2, 31, 999, 1000])
@pytest.mark.parametrize("hint", [lambda number: 0, lambda number: 10**6, lambda number: number, lambda number: 500])
def test_hints_that_are_wrong_cost_tries_and_nothing_else(end: int, hint: Callable[[int], int]) -> None:
    found, tries = search(lambda number: number <= end, hint, 1000)
    assert found == end
    assert tries <= 20
