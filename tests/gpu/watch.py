"""The most memory that a process really held, read from outside every 10 ms: `python -m tests.gpu.watch PID [--cpu]`.

Prints "ready" at once, and for every line on its input one JSON line about the time since the line before.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

INTERVAL_S = 0.01


@dataclass
class Peak:
    """Readings since the last `take`. `longest_gap_s` is the longest time in which nothing was read."""

    read: Callable[[], int]
    peak_bytes: int = 0
    readings: int = 0
    longest_gap_s: float = 0.0
    _last: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self) -> int:
        held = self.read()
        with self._lock:
            now = time.monotonic()
            self.peak_bytes = max(self.peak_bytes, held)
            self.readings += 1
            self.longest_gap_s, self._last = max(self.longest_gap_s, now - self._last), now
        return held

    def take(self) -> dict[str, float]:
        now_bytes = self.look()
        with self._lock:
            result = {
                "peak_bytes": self.peak_bytes,
                "now_bytes": now_bytes,
                "readings": self.readings,
                "longest_gap_s": round(self.longest_gap_s, 4),
            }
            self.peak_bytes = self.readings = 0
            self.longest_gap_s = 0.0
        return result


def driver_reader(pid: int) -> Callable[[], int]:
    """Bytes of a process on the first device, by the driver's management library."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def read() -> int:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return sum(int(process.usedGpuMemory or 0) for process in processes if process.pid == pid)

    return read


def resident_reader(pid: int) -> Callable[[], int]:
    """The resident set of a process: for trying the programs without a GPU."""
    import psutil

    process = psutil.Process(pid)
    return lambda: int(process.memory_info().rss)


def main() -> None:
    pid = int(sys.argv[1])
    peak = Peak(resident_reader(pid) if "--cpu" in sys.argv else driver_reader(pid))
    done = threading.Event()

    def sample() -> None:
        while not done.wait(INTERVAL_S):
            peak.look()

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(peak.take()), flush=True)
    done.set()
    thread.join()


if __name__ == "__main__":
    main()
