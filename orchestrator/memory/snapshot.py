"""One reading of a device's memory, and the peak of a piece of work above where it started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

Source = Literal["nvml_process", "device_delta", "rss", "planned"]


@dataclass(frozen=True)
class Snapshot:
    """Bytes at one moment.

    Attributes:
        total_bytes: of the device, for everybody.
        free_bytes: of the device, for anybody.
        ours_bytes: what this process holds, by `source`.
        allocated_bytes: live tensors of the allocator.
        reserved_bytes: what the allocator took from the device: live tensors and its own free blocks.
        peak_bytes: the highest `allocated_bytes` since the peak was last reset.
        peak_reserved_bytes: the highest `reserved_bytes` since then.
    """

    total_bytes: int
    free_bytes: int
    ours_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int
    source: Source

    @property
    def others_bytes(self) -> int:
        """What is neither free nor ours: other processes."""
        return max(0, self.total_bytes - self.free_bytes - self.ours_bytes)


class MemorySource(Protocol):
    """What can be read and have its peak reset: a device."""

    def snapshot(self) -> Snapshot: ...

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None: ...


@dataclass
class Peak:
    """What a piece of work took above its start.

    Attributes:
        above_bytes: live tensors at the worst moment.
        reserved_bytes: what the allocator had to take from the device for them: fragments included, so this is what
            must be left free for the work to run again.
        kept_bytes: what the work left behind, such as the libraries' workspaces.
    """

    above_bytes: int = 0
    reserved_bytes: int = 0
    kept_bytes: int = 0

    @property
    def charged_bytes(self) -> int:
        """What must be left free for the work to run again: what it keeps is held by then."""
        return max(0, self.reserved_bytes - self.kept_bytes)


@contextmanager
def peak_of(source: MemorySource) -> Iterator[Peak]:
    """Measure the work inside the block. Empties the allocator first: a block that it kept from earlier work would
    hide a peak where only the process's size can be read (a CPU)."""
    source.empty_cache()
    source.reset_peak()
    before = source.snapshot()
    peak = Peak()
    try:
        yield peak
    finally:
        after = source.snapshot()
        # What only waits to be used again is not kept.
        source.empty_cache()
        kept = source.snapshot().allocated_bytes - before.allocated_bytes
        peak.above_bytes = max(0, after.peak_bytes - before.allocated_bytes)
        peak.reserved_bytes = max(0, after.peak_reserved_bytes - before.reserved_bytes)
        peak.kept_bytes = max(0, kept)
