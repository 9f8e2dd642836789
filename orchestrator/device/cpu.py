"""The CPU as a device: its memory is the machine's, its reading the resident set of this process."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil

from orchestrator.device.base import DeviceInfo, Graph, Lane, Reserved
from orchestrator.device.cgroup import cgroup_limit
from orchestrator.device.host_lane import host_lane
from orchestrator.errors import StageError
from orchestrator.memory.snapshot import Snapshot
from orchestrator.units import MiB


class CpuDevice:
    """Host memory. The allocator has no counters here, so `allocated_bytes` and `reserved_bytes` are the resident set
    and the peak is the kernel's high-water mark, reset through `/proc/self/clear_refs` where there is one."""

    torch_device = "cpu"
    supports_graphs = False
    virtual_memory_refusal = "a CPU needs no addresses reserved"
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    source_reason = "resident set of this process, the interpreter and libraries before the start not counted"
    memory_slack_bytes = 64 * MiB
    library_bytes = 0
    page_bytes = 1

    def __init__(self, total_bytes: int | None = None) -> None:
        self._total = total_bytes or min(psutil.virtual_memory().total, cgroup_limit() or sys.maxsize)
        self._process = psutil.Process()
        self._peak_at_reset = 0

    def open(self) -> None:
        self.reset_peak()

    def info(self) -> DeviceInfo:
        return DeviceInfo("cpu", platform.processor() or platform.machine(), self._total)

    def snapshot(self) -> Snapshot:
        ours, high_water = self._process.memory_info().rss, self._high_water()
        return Snapshot(
            total_bytes=self._total,
            free_bytes=max(0, min(psutil.virtual_memory().available, self._total - ours)),
            ours_bytes=ours,
            allocated_bytes=ours,
            reserved_bytes=ours,
            peak_bytes=max(ours, high_water),
            peak_reserved_bytes=max(ours, high_water),
            source="rss",
        )

    def process_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def reset_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._peak_at_reset = 0
        except OSError:
            # The mark cannot be reset: one from before would pass for a peak of what comes next.
            self._peak_at_reset = _high_water_mark()

    def _high_water(self) -> int:
        mark = _high_water_mark()
        return mark if mark > self._peak_at_reset else 0

    def empty_cache(self) -> None:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)

    def pin(self, tensor: Any) -> Any:
        return tensor

    def lane(self, size: int, scratch_bytes: int = 0) -> AbstractContextManager[Lane]:
        return host_lane(size)

    def synchronize(self) -> None:
        return None

    def limit(self, allocator_bytes: int | None) -> None:
        return None

    def reserve(self, size: int) -> Reserved:
        raise StageError("a CPU reserves no addresses")

    def graph_pool(self) -> Any:
        return None

    def capture(self, work: Callable[[], Any], pool: Any) -> Graph:
        raise StageError("a CPU has no graphs")

    def close(self) -> None:
        return None


def _high_water_mark() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
