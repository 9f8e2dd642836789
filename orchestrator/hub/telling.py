"""How far a download is, in lines: for logs, where no bar is seen."""

from __future__ import annotations

import time
from threading import Lock

from orchestrator.events import Events, Progress
from orchestrator.units import format_size

EVERY_S = 30.0


class Telling:
    """Passes progress on, and says a line when the last one is `every_s` ago; any thread may advance it."""

    def __init__(self, events: Events, progress: Progress, total: int, every_s: float = EVERY_S) -> None:
        self._events, self._progress, self._total, self._every_s = events, progress, total, every_s
        self._begin = self._last = time.monotonic()
        self._done = 0
        self._door = Lock()

    def advance(self, amount: int) -> None:
        with self._door:
            self._progress.advance(amount)
            self._done += amount
            now = time.monotonic()
            if now - self._last >= self._every_s:
                self._last = now
                self._events.info(f"downloaded {self._done / self._total:.0%} of {format_size(self._total)}")

    def end(self) -> None:
        seconds = time.monotonic() - self._begin
        self._events.info(f"downloaded {format_size(self._total)} in {seconds:.1f} s")
