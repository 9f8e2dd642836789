"""The CPU as a device: its memory is the machine's, its reading the resident set of this process."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from pathlib import Path

import psutil

from orchestrator.device.base import DeviceInfo
from orchestrator.memory.snapshot import Snapshot
from orchestrator.units import MiB

_CGROUP = Path("/sys/fs/cgroup")


class CpuDevice:
    """Host memory. The allocator has no counters here, so `allocated_bytes` and `reserved_bytes` are the resident set
    and the peak is the kernel's high-water mark, reset through `/proc/self/clear_refs` where there is one."""

    torch_device = "cpu"
    supports_graphs = False
    dtypes = frozenset({"float32", "float16", "bfloat16"})
    source_reason = "resident set of this process, the interpreter and libraries before the start not counted"
    memory_slack_bytes = 64 * MiB

    def __init__(self, total_bytes: int | None = None) -> None:
        self._total = total_bytes or min(psutil.virtual_memory().total, cgroup_limit() or sys.maxsize)
        self._process = psutil.Process()
        self._peak_at_reset = 0

    def open(self) -> None:
        self.reset_peak()

    def info(self) -> DeviceInfo:
        return DeviceInfo("cpu", platform.processor() or platform.machine(), self._total)

    def snapshot(self) -> Snapshot:
        ours = self._process.memory_info().rss
        return Snapshot(
            total_bytes=self._total,
            free_bytes=max(0, min(psutil.virtual_memory().available, self._total - ours)),
            ours_bytes=ours,
            allocated_bytes=ours,
            reserved_bytes=ours,
            peak_bytes=max(ours, self._high_water()),
            source="rss",
        )

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

    def synchronize(self) -> None:
        return None

    def limit(self, allocator_bytes: int) -> None:
        return None

    def close(self) -> None:
        return None


def cgroup_limit() -> int | None:
    """Bytes that the process's control group may use, if a limit is set (cgroup v2, then v1)."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (_CGROUP / name).read_text().strip()
        except OSError:
            continue
        # Version 1 writes "no limit" as a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _high_water_mark() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
