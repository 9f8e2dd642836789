"""One monotonic clock, whose zero is the start of the process as the operating system tells it."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Clock:
    """Seconds since `zero`, a reading of `time.monotonic()`."""

    def __init__(self, zero: float) -> None:
        self._zero = zero

    @classmethod
    def since_process_start(cls) -> Clock:
        """A clock that includes the interpreter's own start."""
        return cls(time.monotonic() - _process_age())

    @classmethod
    def from_now(cls) -> Clock:
        """A clock for work that shares a process with other work."""
        return cls(time.monotonic())

    def now(self) -> float:
        return time.monotonic() - self._zero


def _process_age() -> float:
    """Seconds since this process was started.

    Linux counts in clock ticks (10 ms on most machines) since boot, on a clock that includes suspends. Elsewhere
    psutil's creation time is used, which is on the wall clock.
    """
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, AttributeError, ValueError, IndexError):
        import psutil

        return max(0.0, time.time() - psutil.Process().create_time())
