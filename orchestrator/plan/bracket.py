"""A search for the largest number that fits, where each try also says about where the end is."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor

_TRUST = 6
"""Tries after which the hints have had their chance, and the rest is halved."""


@dataclass
class Bracket:
    """Between a number that fits and one that does not.

    A hint is the largest number that would fit if what a start takes did not depend on the number. Starts take more
    with a larger one, so the end lies between a number and its hint. Hints only choose what is tried next.

    Attributes:
        low: the largest number that fits so far.
        high: the smallest that does not; None while none is known.
    """

    low: int
    high: int | None
    _seen: list[tuple[int, int]] = field(default_factory=list)

    @property
    def open(self) -> bool:
        return self.high is None or self.high - self.low > 1

    def tried(self, number: int, fits: bool, hint: int) -> None:
        self.low, self.high = (number, self.high) if fits else (self.low, number)
        self._seen.append((number, hint))

    def guess(self) -> int:
        """What to try next."""
        if self.high is None:
            return max(self.low + 1, self._meeting())
        if len(self._seen) >= _TRUST:
            return (self.low + self.high) // 2
        least, most = self._between(self.low + 1, self.high - 1)
        meeting = max(least, min(self._meeting(), most))
        # A meeting at an edge is tried once or twice; then the line is not straight there.
        return meeting if least < meeting < most or len(self._seen) <= _TRUST // 2 else (least + most) // 2

    def _between(self, least: int, most: int) -> tuple[int, int]:
        """Where the end must be by the hints, as far as they agree with what was tried."""
        for number, hint in self._seen:
            if hint < number:
                least = max(least, min(hint, most))
            else:
                most = min(most, max(hint, least))
        return least, most

    def _meeting(self) -> int:
        """The number that is its own hint, on a line through the first and the last that were tried."""
        (first, its_hint), (number, hint) = self._seen[0], self._seen[-1]
        if first == number:
            return hint
        slope = (hint - its_hint) / (number - first)
        return floor((hint - slope * number) / (1 - slope)) if slope < 1 else hint
