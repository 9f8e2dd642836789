"""The highest of many readings while something else runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class PeakSampler:
    """Reads a number every `interval_s` seconds in a thread, and at both ends; `peak` is the highest.

    What an allocator counts misses what lies outside it; a reading of the whole process, taken often, does not.
    """

    def __init__(self, read: Callable[[], int], interval_s: float = 0.01) -> None:
        self._read, self._interval_s = read, interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak sampler", daemon=True)
        self.peak = 0
        self.readings = 0

    def __enter__(self) -> PeakSampler:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._done.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        self.peak = max(self.peak, self._read())
        self.readings += 1
