"""What threads have done and what is left, for the one that waits for them."""

from __future__ import annotations

import threading


class Tally:
    """Counts pieces of work and bytes; the first error ends the wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left = self._done_bytes = 0
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def add(self) -> None:
        with self._changed:
            self._left += 1

    def done(self, nbytes: int) -> None:
        with self._changed:
            self._left -= 1
            self._done_bytes += nbytes
            if self._left == 0:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep the first error."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is left; returns early if so, and after `timeout_s` anyway.

        Raises:
            BaseException: what was given to `fail`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._left == 0, timeout_s)
            if self._error is not None:
                raise self._error
            return self._left == 0

    def take_bytes(self) -> int:
        """Bytes done since the last call."""
        with self._changed:
            taken, self._done_bytes = self._done_bytes, 0
            return taken
