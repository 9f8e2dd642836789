"""One cap for all starts of a process: the allocator knows a single number, and each start has a ceiling of its own."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary


class SharedCap:
    """The sum of what the live starts of a process may take from the allocator, and of what lay there before the first.

    A start that is gone, closed or merely dropped, counts no longer. With none left, or with one that has no ceiling,
    there is no cap: one allocator cannot hold back one of its users.

    Args:
        write: puts a cap in bytes on the allocator; None lifts it.
    """

    def __init__(self, write: Callable[[int | None], None]) -> None:
        self._write = write
        self._ceilings: WeakKeyDictionary[object, int | None] = WeakKeyDictionary()
        self._before = 0

    def set(self, start: object, ceiling: int | None, reserved_before: int) -> None:
        """Give `start` a ceiling, or another one, or none at all.

        Args:
            reserved_before: what the allocator held when the start began; counts if no other start was alive.
        """
        if not self._ceilings:
            self._before = reserved_before
        self._ceilings[start] = ceiling
        self._apply()

    def leave(self, start: object) -> None:
        """Take a start's ceiling away. May be called again."""
        if start in self._ceilings:
            del self._ceilings[start]
            self._apply()

    def _apply(self) -> None:
        ceilings = list(self._ceilings.values())
        known = [ceiling for ceiling in ceilings if ceiling is not None]
        self._write(self._before + sum(known) if ceilings and len(known) == len(ceilings) else None)
